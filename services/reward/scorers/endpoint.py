"""Client of a web service for scorers: concurrent requests, retried until a deadline."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import httpx

from penstock.shared.config.service import load_settings
from penstock.shared.errors import ScoringError, Unavailable
from penstock.shared.transport.address import pinned

__all__ = ["Call", "Endpoint", "variable"]

_MAX_REPLY_BYTES = 8 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_QUOTED = 200
_NOT_TAKEN = {429, 503}
"""Status codes by which the server states that it did not process the request."""
_PASSING = {408, 425, 500, 502, 504} | _NOT_TAKEN
"""Status codes that may be transient; except 429 and 503, they are retried only if a repeated request is harmless."""


@dataclass(frozen=True, slots=True)
class Call:
    """Body and extra headers of one request."""

    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class _Passing(Exception):  # noqa: N818  not an error by itself: another attempt may follow
    """Raised for a failure that a retry may avoid."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class Endpoint:
    """Sends JSON by POST to one address. Keeps its event loop and connections between groups."""

    def __init__(
        self, url: str, headers: dict[str, str], *, concurrency: int, timeout_s: float, repeatable: bool
    ) -> None:
        """Open the client. ``repeatable``: repeating a request is harmless even if the server processed it."""
        self._url, self._repeatable, self._timeout_s = url, repeatable, timeout_s
        settings = load_settings()
        # The operator's own model may have a private address; an address in a job config needs the operator's
        # permission.
        own = bool(settings.grader_url) and url.startswith(f"{settings.grader_url.rstrip('/')}/")
        self._private = settings.scorer_private or own
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            headers={"Content-Type": "application/json", **headers},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            follow_redirects=False,
            trust_env=self._private,  # a proxy would resolve names after the address check
        )
        self._concurrency = concurrency

    def close(self) -> None:
        """Close the connections and the event loop."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    def post_all(self, calls: Sequence[Call], deadline_s: float) -> list[bytes | ScoringError]:
        """Send all requests, and return for each one the body of its successful (2xx) response or an error. This takes
        at most ``deadline_s`` seconds."""
        return self._runner.run(self._post_all(calls, time.monotonic() + deadline_s))

    async def _post_all(self, calls: Sequence[Call], deadline: float) -> list[bytes | ScoringError]:
        slots = asyncio.Semaphore(self._concurrency)

        async def post(call: Call) -> bytes | ScoringError:
            try:
                async with asyncio.timeout(deadline - time.monotonic()), slots:
                    return await self._until_answered(call, deadline)
            except ScoringError as error:
                return error
            except TimeoutError:
                return ScoringError(f"{self._url} did not answer before the deadline")

        return await asyncio.gather(*(post(call) for call in calls))

    async def _until_answered(self, call: Call, deadline: float) -> bytes:
        pause_s, attempts = _FIRST_PAUSE_S, 0
        while True:
            attempts += 1
            try:
                return await self._post(call)
            except _Passing as problem:
                wait_s = max(problem.wait_s, pause_s * random.uniform(0.5, 1.0))
                if time.monotonic() + wait_s >= deadline:
                    raise ScoringError(f"{problem} (attempt {attempts}, the last before the deadline)") from None
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _post(self, call: Call) -> bytes:
        """Send one request and return the body of its response. Raises _Passing if a retry may help, else
        ScoringError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with await self._sent(call) as reply:
                    body = await self._read(reply)
        except Unavailable as error:
            raise ScoringError(f"{self._url} is not asked: {error}") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Passing(f"{self._url} cannot be reached: {error or type(error).__name__}") from None
        except (httpx.HTTPError, TimeoutError) as error:
            text = f"{self._url} did not answer: {error or type(error).__name__}"
            raise (_Passing(text) if self._repeatable else ScoringError(text)) from None
        if reply.is_success:
            return body
        text = f"{self._url} answers {reply.status_code}: {body[:_QUOTED].decode(errors='replace')}"
        if reply.status_code in (_PASSING if self._repeatable else _NOT_TAKEN):
            raise _Passing(text, _retry_after_s(reply))
        raise ScoringError(text)

    async def _sent(self, call: Call) -> AbstractAsyncContextManager[httpx.Response]:
        """Check the endpoint's address and return the request as a context manager; entering it sends the request.
        Raises Unavailable if the address is not permitted."""
        if self._private:
            return self._client.stream("POST", self._url, content=call.body, headers=call.headers)
        target, netloc, name = await pinned(httpx.URL(self._url), private=False, setting="PENSTOCK_SCORER_PRIVATE")
        headers, extensions = {**call.headers, "Host": netloc}, {"sni_hostname": name}
        return self._client.stream("POST", target, content=call.body, headers=headers, extensions=extensions)

    async def _read(self, reply: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in reply.aiter_bytes():
            body += chunk
            if len(body) > _MAX_REPLY_BYTES:
                raise ScoringError(f"{self._url} answers with more than {_MAX_REPLY_BYTES} bytes")
        return bytes(body)


def variable(name: str, what: str) -> str:
    """Return the value of the environment variable ``name``, which holds a secret.

    A job config chooses the secret's destination, so the deployment lists the variables that may be used.

    Raises:
        ScoringError: the variable is not in PENSTOCK_SCORER_ENV, or not set in the reward service.
    """
    allowed = [one.strip() for one in load_settings().scorer_env.split(",") if one.strip()]
    if name not in allowed:
        raise ScoringError(
            f"{what} may not use the environment variable {name}: PENSTOCK_SCORER_ENV of the reward service allows "
            f"{', '.join(allowed) or 'none'}; whoever runs the service can add it"
        )
    value = os.environ.get(name, "")
    if not value:
        raise ScoringError(f"the environment variable {name} of the reward service is not set; {what} needs it")
    return value


def _retry_after_s(reply: httpx.Response) -> float:
    """Return the seconds of the Retry-After header; 0 for dates and invalid values."""
    try:
        return max(0.0, float(reply.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
