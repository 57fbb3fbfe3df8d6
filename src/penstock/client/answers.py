"""Conversion of HTTP replies to values and errors, and the retry policy."""

from __future__ import annotations

import os
import random
import ssl
from typing import Any

import httpx

from penstock.shared.config.local_key import find_key
from penstock.shared.errors import (
    ConfigError,
    Conflict,
    DeadlineError,
    NotFound,
    PenstockError,
    ProtocolError,
    StreamFull,
    Unavailable,
)

__all__ = [
    "DEFAULT_URL",
    "authorities",
    "base_url",
    "body_of",
    "default_headers",
    "error_of",
    "find_api_key",
    "is_in_flight",
    "pause_s",
    "unreachable",
]

DEFAULT_URL = "http://127.0.0.1:8000"
LONGEST_PAUSE_S = 5.0
_AGAIN = frozenset({429, 502, 503, 504})
_LISTED = {"invalid_job": "job", "invalid_file": "file"}
"""Word for an uploaded object in error messages (job, file), by the code of the problem that lists its flaws."""


def base_url(url: str | None) -> str:
    """Return ``url``, or PENSTOCK_URL, or the local default. Raises ConfigError if it is not an http(s) URL."""
    found = (url or os.environ.get("PENSTOCK_URL") or DEFAULT_URL).rstrip("/")
    if not found.startswith(("http://", "https://")):
        raise ConfigError(f"'{found}' is not a URL of the API; it should look like {DEFAULT_URL}")
    return found


def authorities(url: str) -> ssl.SSLContext | bool:
    """Return the argument ``verify`` of httpx for ``url``: True for HTTPS; for plain HTTP, an empty TLS context.

    The empty context saves the 20 ms for loading the usual authorities.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http://") else True


def find_api_key(url: str) -> str:
    """Return the key for ``url`` from PENSTOCK_API_KEY or this user's key file, or "" if neither has one."""
    return os.environ.get("PENSTOCK_API_KEY") or find_key(url) or ""


def default_headers(api_key: str | None, url: str) -> dict[str, str]:
    """Return the Authorization header from ``api_key``, PENSTOCK_API_KEY, or this user's key file for ``url``.

    Return {} if none of these has a key.

    Raises:
        ConfigError: the key contains characters that no key has.
    """
    key = api_key or find_api_key(url)
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key holds characters that no key has: pass the key itself, or leave it out")
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_in_flight(response: httpx.Response) -> bool:
    """Return True if the server is still processing an earlier request with the same Idempotency-Key."""
    return response.status_code == 409 and response.headers.get("x-should-retry") == "true"


def pause_s(attempt: int, response: httpx.Response | None) -> float | None:
    """Return the seconds to wait before the next attempt, or None if a retry is pointless.

    ``response`` is None if the last attempt got no reply.
    """
    if response is None:
        return float(min(0.1 * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.75, 1.25))
    if response.status_code not in _AGAIN and response.headers.get("x-should-retry") != "true":
        return None
    wanted = response.headers.get("retry-after", "")
    if wanted.isdigit():
        return float(wanted) if int(wanted) <= LONGEST_PAUSE_S else None
    return pause_s(attempt, None)


def unreachable(url: str, error: Exception | None) -> Unavailable:
    """Return the error for a server that does not answer."""
    reason = f" ({error or type(error).__name__})" if error is not None else ""
    return Unavailable(
        f"no answer from {url}{reason}; start one with 'penstock up', or set PENSTOCK_URL to where it runs"
    )


def body_of(response: httpx.Response) -> Any:
    """Return the JSON of a successful reply, None for 204. Raises ProtocolError if the reply is not JSON.

    Raises the error that ``error_of`` returns for any other reply.
    """
    if response.status_code == 204:
        return None
    if response.is_success:
        try:
            return response.json()
        except ValueError:
            raise ProtocolError(f"{response.request.url} did not answer with JSON: is it a Penstock API?") from None
    raise error_of(response)


def error_of(response: httpx.Response) -> PenstockError:
    """Return the error that the problem document of a reply describes. The caller has read the body of the reply."""
    status = response.status_code
    try:
        problem = response.json()
        detail = str(problem["detail"])
        code = str(problem["error"]["code"])
        flaws = [(str(e["pointer"]), str(e["detail"])) for e in problem.get("errors", [])]
    except (ValueError, KeyError, TypeError):
        return Unavailable(
            f"{response.request.url} answered {status} without a problem document: is it a Penstock API?"
        )
    if flaws and code in _LISTED:
        lines = [f"{pointer.strip('/').replace('/', '.') or '(top level)'}: {text}" for pointer, text in flaws]
        return ConfigError(f"{_LISTED[code]} is not valid:\n  " + "\n  ".join(lines))
    return _kind(status, code)(detail)


def _kind(status: int, code: str) -> type[PenstockError]:
    if code in ("backlog_full", "ingest_backlog_full"):
        return StreamFull
    if status >= 500:
        return {503: Unavailable, 502: Unavailable, 504: DeadlineError}.get(status, PenstockError)
    return {404: NotFound, 409: Conflict, 412: Conflict, 429: Unavailable}.get(status, ConfigError)
