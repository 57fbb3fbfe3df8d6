"""Where deliveries may go: not into the network that the coordinator stands in, unless the deployment allows it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from penstock.shared.errors import ConfigError, Unavailable

__all__ = ["check_url", "reachable_address"]

MAX_CHARS = 2000
RESOLVE_S = 5.0


def check_url(url: str, *, private: bool) -> str:
    """``url``. Raises ConfigError unless deliveries may go there, as far as can be told without asking for its name."""
    try:
        parts = urlsplit(url)
        host, secret, _ = parts.hostname, parts.username or parts.password, parts.port
    except ValueError as error:
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
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise Unavailable(f"'{host}' has no address: {error or type(error).__name__}") from None
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for text in [] if private else addresses:
        _check(ipaddress.ip_address(text), host, Unavailable)
    return addresses[0]


def _check(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, host: str, kind: type[ConfigError] | type[Unavailable]
) -> None:
    inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None) or address
    if not inner.is_global or inner.is_multicast:
        raise kind(
            f"'{host}' is {address}, a private address; whoever runs the coordinator allows those with "
            "PENSTOCK_WEBHOOK_PRIVATE=true"
        )
