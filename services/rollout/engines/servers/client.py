"""HTTP client of an engine's server, which is a child process of the rollout worker or is already running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock.services.rollout.engines.remote import CALL_S
from penstock.shared.errors import PenstockError, Unavailable

__all__ = ["EngineServer", "free_port"]

START_S = 900.0
"""Timeout in seconds for starting a server, including loading the model."""
STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_POLL_S = 0.5
_LEASH = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG, which holds after exec
    "os.setpgid(0, 0)\n"  # its own group, in the worker's session: Linux may let a busy session starve other ones
    "os.getppid() == int(sys.argv[1]) or sys.exit('the rollout worker is gone')\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def free_port() -> int:
    """Return a free port on the loopback address; another process may take the port before the caller uses it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineServer:
    """Client of one server. Calls have a timeout, except reading ``events``; a lost server raises ``Unavailable``.

    Each call opens its own connection, because a server may close a connection just when it would be reused: after an
    error, or when it was idle.

    Args:
        engine: name of the engine, for messages.
        socket_path: Unix socket on which the server listens; None: the address in ``url``.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        process: asyncio.subprocess.Process | None = None,
        *,
        socket_path: Path | None = None,
    ) -> None:
        self._engine, self.url, self._process = engine, url.rstrip("/"), process
        self._place = self.url if socket_path is None else str(socket_path)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(
            uds=None if socket_path is None else str(socket_path), limits=limits, trust_env=False
        )
        self._http = httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(CALL_S), transport=transport)

    @classmethod
    async def start(
        cls,
        engine: str,
        python: Path,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        socket_path: Path | None = None,
    ) -> EngineServer:
        """Start a server as a child that ends with this process; its output goes to stderr.

        Args:
            words: arguments of the interpreter that start the server, without the address to listen on.
            environment: variables added to this process's environment, which is passed on without its ``PENSTOCK_*``.
            socket_path: Unix socket on which the server is to listen (``--uds``); None: a free port of the loopback
                address (``--host``, ``--port``).

        Raises:
            Unavailable: the interpreter does not start.
        """
        url, address = "http://server", ["--uds", str(socket_path)]
        if socket_path is None:
            port = free_port()
            url, address = f"http://127.0.0.1:{port}", ["--host", "127.0.0.1", "--port", str(port)]
        command = [str(python), *words, *address]
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        try:
            process = await asyncio.create_subprocess_exec(
                str(python), "-c", _LEASH, str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=2, env={**inherited, "PATH": path, **environment},
            )  # fmt: skip
        except OSError as error:
            reason = error.strerror or error
            raise Unavailable(f"{engine}'s interpreter '{python}' does not start: {reason}") from None
        return cls(engine, url, process, socket_path=socket_path)

    @property
    def is_own(self) -> bool:
        """True if this client started the server."""
        return self._process is not None

    @property
    def is_gone(self) -> bool:
        """True once a server that this client started has ended."""
        return self._process is not None and self._process.returncode is not None

    async def ready(self, path: str, *, older: str = "") -> dict[str, Any]:
        """Wait until the server responds at ``path`` (see ``get``); returns its response.

        Raises:
            Unavailable: the server ended, or did not respond in time (``START_S``; ``CALL_S`` if already running).
        """
        end = time.monotonic() + (START_S if self.is_own else CALL_S)
        while True:
            if self._process is not None and self._process.returncode is not None:
                raise Unavailable(
                    f"{self._engine} does not start: it ended with status {self._process.returncode}; its output is "
                    "in the log"
                )
            try:
                return await self.get(path, "say what it is", older=older)
            except Unavailable as error:
                if time.monotonic() > end:
                    raise Unavailable(f"{self._engine} at {self._place} is not ready: {error}") from None
            await asyncio.sleep(_POLL_S)

    async def get(self, path: str, what: str, *, older: str = "") -> dict[str, Any]:
        """Return the JSON object at ``path``. Servers of earlier versions may have the object at ``older`` instead.

        Raises:
            Unavailable: the server does not respond within ``CALL_S``, or responds with an error or no JSON object.
        """
        answer = await self._send("GET", path, None, what)
        if older and answer.status_code == httpx.codes.NOT_FOUND:
            answer = await self._send("GET", older, None, what)
        self._check(answer, what, Unavailable)
        found = _json(answer.content)
        if not isinstance(found, dict):
            raise Unavailable(f"{self._place}{path} answers with no JSON object: is that a server of {self._engine}?")
        return found

    async def post(
        self, path: str, body: Mapping[str, Any], what: str, kind: type[PenstockError] = Unavailable
    ) -> dict[str, Any]:
        """Post a JSON body; returns the response, {} if it is not a JSON object.

        Args:
            what: action for error messages: "<engine> could not <what>".
            kind: class of the error if the server rejects the request.

        Raises:
            Unavailable: the server does not respond within ``CALL_S``.
            PenstockError: an error of class ``kind``; the server rejects the request.
        """
        answer = await self._send("POST", path, body, what)
        self._check(answer, what, kind)
        found = _json(answer.content)
        return found if isinstance(found, dict) else {}

    def _check(self, answer: httpx.Response, what: str, kind: type[PenstockError]) -> None:
        found = _json(answer.content)
        if not answer.is_success or (isinstance(found, dict) and found.get("success") is False):
            raise kind(f"{self._engine} could not {what}: {_reason(answer)}")

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, what: str) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.TimeoutException:
            raise Unavailable(f"{self._engine} did not {what} within {CALL_S:g} s") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{self._engine} could not {what}: it is gone ({error!r})") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream; no read timeout, because a paused server sends nothing.

        An HTTP error is yielded as one event with the key ``error``.

        Raises:
            Unavailable: the server is gone, or the stream ends without its end marker.
        """
        silent = httpx.Timeout(CALL_S, read=None)
        try:
            async with self._http.stream("POST", path, json=body, timeout=silent) as answer:
                if not answer.is_success:
                    await answer.aread()
                    yield {"error": {"message": _reason(answer), "code": answer.status_code}}
                    return
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield json.loads(line[len("data: ") :])
        except httpx.TransportError as error:
            raise Unavailable(f"{self._engine} is gone in the middle of a completion ({error!r})") from None
        raise Unavailable(f"{self._engine} closed the stream of a completion before its end")

    async def close(self) -> None:
        """Stop a server that this client started, with all its processes. Safe to repeat."""
        await self._http.aclose()
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        _signal(process.pid, signal.SIGKILL)  # also remaining processes of its group
        await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _reason(answer: httpx.Response) -> str:
    """Return the reason of an error response in one line; engines have several formats of errors."""
    found = _json(answer.content)
    if isinstance(found, dict):
        error = found.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        text = str(said or found.get("message") or found.get("detail") or found)
    else:
        text = answer.text
    return f"{(text.strip().splitlines() or ['no reason'])[0]} (HTTP {answer.status_code})"
