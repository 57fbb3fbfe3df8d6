"""Where a request to an address that a user chose may go: not into the network of the service, unless that is allowed.

A name is resolved, checked and connected to by the address that was checked, so that it cannot change in between.
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
"""The setting that allows private addresses where a caller names no other."""

MAX_CHARS = 2000
RESOLVE_S = 5.0
RESOLVER = ThreadPoolExecutor(2, thread_name_prefix="resolve")
"""Names that resolve slowly hold up such requests alone: the loop's own threads serve files and folds."""
CARRIERS = tuple(ipaddress.IPv6Network(text) for text in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
"""Whose last 32 bits are an IPv4 address: compatible, mapped, translated (RFC 2765), NAT64 (RFC 6052)."""


def check_url(url: str, *, private: bool) -> str:
    """``url``. Raises ConfigError unless deliveries may go there, as far as can be told without asking for its name."""
    try:
        parts = urlsplit(url)
        host, secret, _ = parts.hostname, parts.username or parts.password, parts.port
        httpx.URL(url)  # what deliveries make of it
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
    """An address of ``host`` to connect to: the one that was checked, so that a name cannot change in between.

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
    """``(url, Host, name for TLS)`` of a request that goes to an address of ``url`` that was checked.

    Raises:
        Unavailable: the name has no address, or one of them is private.
    """
    host = url.raw_host.decode("ascii")  # a name in another script as punycode, for all that follows
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
    """The IPv4 address that an IPv6 address leads to; else itself. A site's own NAT64 (RFC 8215) counts as reserved."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if any(address in network for network in CARRIERS):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or address
