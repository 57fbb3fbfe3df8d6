"""Who calls: bearer keys, or nobody but this machine."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers

from penstock.services.coordinator.api.replies import HttpProblem
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError

__all__ = ["ANONYMOUS", "KeyRing"]

ANONYMOUS = "local"
"""Caller id where no keys are configured."""


class KeyRing:
    """The bearer keys of a deployment, kept as digests.

    Raises:
        ConfigError: the API would be open to the network without a key.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        keys = [key.strip() for key in settings.api_keys.split(",") if key.strip()]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        if not keys and not _is_loopback(settings.http_host):
            raise ConfigError(
                f"the API would listen on {settings.http_host} without a key: set PENSTOCK_API_KEYS "
                "(comma-separated), or PENSTOCK_HTTP_HOST=127.0.0.1"
            )

    @property
    def required(self) -> bool:
        """Requests need a key."""
        return bool(self._digests)

    def caller(self, headers: Headers) -> str:
        """Id of the caller: the start of the key's digest, never the key.

        Raises:
            HttpProblem: 401 without a valid key; 403 where no keys exist and the request comes by way of a web page.
        """
        if not self._digests:
            _refuse_foreign_pages(headers)
            return ANONYMOUS
        presented = hashlib.sha256(_presented(headers).encode()).digest()
        matches = [hmac.compare_digest(presented, known) for known in self._digests]  # all of them: no early exit
        if not any(matches):
            raise HttpProblem(
                401,
                "invalid_api_key",
                "a valid key is needed: send 'Authorization: Bearer KEY' (PENSTOCK_API_KEY for the command line)",
                headers={"WWW-Authenticate": 'Bearer realm="penstock"'},
            )
        return presented.hex()[:16]


def _presented(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")


def _refuse_foreign_pages(headers: Headers) -> None:
    """Without keys, loopback is the only protection: a page in the user's browser must not get around it."""
    host = _host_name(headers.get("host", "localhost"))
    origin = headers.get("origin")
    origin_host = _host_name(origin.partition("://")[2]) if origin else "localhost"
    if not (_is_loopback(host) and _is_loopback(origin_host)):
        raise HttpProblem(
            403,
            "not_local",
            f"without PENSTOCK_API_KEYS only this machine may call (Host '{host}', Origin '{origin or 'none'}')",
        )


def _host_name(netloc: str) -> str:
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
