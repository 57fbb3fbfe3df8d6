"""Where deliveries may go: not into the network that the coordinator stands in, unless the deployment allows it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx

from penstock.shared.errors import ConfigError, Unavailable

__all__ = ["check_url", "reachable_address"]

MAX_CHARS = 2000
RESOLVE_S = 5.0
RESOLVER = ThreadPoolExecutor(2, thread_name_prefix="resolve")
"""Names that resolve slowly hold up webhooks alone: the loop's own threads serve files and folds."""
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


async def reachable_address(host: str, port: int, *, private: bool) -> str:
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
        _check(ipaddress.ip_address(text), host, Unavailable)
    return addresses[0]


def _check(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, host: str, kind: type[ConfigError] | type[Unavailable]
) -> None:
    inner = _carried(address)
    site_local = isinstance(inner, ipaddress.IPv6Address) and inner.is_site_local
    if not inner.is_global or inner.is_multicast or inner.is_reserved or site_local:
        raise kind(
            f"'{host}' is {address}, a private address; whoever runs the coordinator allows those with "
            "PENSTOCK_WEBHOOK_PRIVATE=true"
        )


def _carried(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 address leads to; else itself. A site's own NAT64 (RFC 8215) counts as reserved."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if any(address in network for network in CARRIERS):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or address
