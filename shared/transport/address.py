"""Address checks for URLs that users choose: a request to such a URL must not reach the service's own network, unless a
setting allows it.

A host name is resolved once, and the connection uses the address that was checked, so that it cannot change in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx

from penstock.shared.errors import ConfigError, Unavailable

__all__ = ["WEBHOOKS", "check_url", "pinned", "reachable_address"]

WEBHOOKS = "PENSTOCK_WEBHOOK_PRIVATE"
"""Setting that allows private addresses for webhooks; error messages name it, unless the caller passes another name."""

MAX_CHARS = 2000
RESOLVE_S = 5.0
RESOLVER = ThreadPoolExecutor(2, thread_name_prefix="resolve")
"""Threads for DNS alone. So slow look-ups delay only requests to users' URLs, and not the work in the event loop's
default executor."""
CARRIERS = tuple(ipaddress.IPv6Network(text) for text in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
"""IPv6 networks whose last 32 bits are an IPv4 address: compatible, mapped, translated (RFC 2765), NAT64 (RFC 6052)."""


def check_url(url: str, *, private: bool) -> str:
    """Return ``url`` if events may be delivered to it; raise ConfigError otherwise. The host name is not resolved."""
    try:
        parts = urlsplit(url)
        host, secret, _ = parts.hostname, parts.username or parts.password, parts.port
        httpx.URL(url)  # as deliveries parse it
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigError(f"'{url[:200]}' is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host or len(url) > MAX_CHARS or not url.isprintable():
        raise ConfigError(f"'{url[:200]}' is not an http:// or https:// URL with a host, of {MAX_CHARS} characters")
    if secret or parts.fragment:
        raise ConfigError("a URL of a webhook has no user, password or fragment; deliveries are signed instead")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return url
    if not private:
        _check(address, host, ConfigError)
    return url


async def reachable_address(host: str, port: int, *, private: bool, setting: str = WEBHOOKS) -> str:
    """Resolve ``host``, check all of its addresses, and return an address to connect to.

    Connect to this address and not to the name, which might resolve to another address the next time.

    Raises:
        Unavailable: the name has no address, or one of them is private.
    """
    try:
        async with asyncio.timeout(RESOLVE_S):
            ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(RESOLVER, ask)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise Unavailable(f"'{host}' has no address: {error or type(error).__name__}") from None
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for text in [] if private else addresses:
        _check(ipaddress.ip_address(text), host, Unavailable, setting)
    return addresses[0]


async def pinned(url: httpx.URL, *, private: bool, setting: str = WEBHOOKS) -> tuple[httpx.URL, str, str]:
    """Resolve and check ``url``; return what a request needs: ``(URL with the IP address, Host header, name for TLS)``.

    Raises:
        Unavailable: the name has no address, or one of them is private.
    """
    host = url.raw_host.decode("ascii")  # a name in another script, as punycode from here on
    port = url.port or (443 if url.scheme == "https" else 80)
    address = await reachable_address(host, port, private=private, setting=setting)
    return url.copy_with(host=address), url.netloc.decode("ascii"), host


def _check(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
    host: str,
    kind: type[ConfigError] | type[Unavailable],
    setting: str = WEBHOOKS,
) -> None:
    inner = _carried(address)
    site_local = isinstance(inner, ipaddress.IPv6Address) and inner.is_site_local
    if not inner.is_global or inner.is_multicast or inner.is_reserved or site_local:
        raise kind(
            f"'{host}' is {address}, a private address; whoever runs the deployment allows those with {setting}=true"
        )


def _carried(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address embedded in an IPv6 address; return ``address`` itself if there is none.

    Addresses of a site's own NAT64 (RFC 8215) are not converted: ``_check`` rejects all of them as reserved.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if any(address in network for network in CARRIERS):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or address
