"""Collects the output of one run, and stops the run at its time limit or its output limit."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from penstock.shared.sandbox.plan import READY, START_LIMIT_S, STOP, Verdict

__all__ = ["Outcome", "collect"]

_PATIENCE_S = 10.0
"""Longest wait for the warden's report after a request to stop a run (seconds); then the warden is considered dead."""
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run: how it ended, its standard output, and the value of each step (a call or a test)."""

    verdict: Verdict
    stdout: bytes
    flooded: bool
    """True if the run was stopped because it exceeded its output limit."""
    steps: dict[int, Any]
    """Value that each step reported, by number of the step; steps that raised or did not run are missing."""

    @property
    def ok(self) -> bool:
        """True if the run ended by itself and reported success."""
        return self.verdict == Verdict("exit", 0) and not self.flooded


def collect(
    channel: socket.socket, out: int, results: int, *, nonce: str, limit_s: float, output_bytes: int
) -> Outcome:
    """Collect a run's output until the run's end is reported; return the outcome. The report comes from the warden, the
    process that starts and ends runs.

    The time limit counts from the moment at which the run is contained.

    Raises:
        OSError: the run was not contained, the warden died, or it does not answer.
    """
    run = _Run(channel, out, results, limit_s=limit_s, output_bytes=output_bytes)
    with selectors.DefaultSelector() as selector:
        for source in (out, results, channel.fileno()):
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(run.left_s):
                if run.read(key.fd):
                    selector.unregister(key.fd)
            run.look_at_clock()
    return run.outcome(nonce)


class _Run:
    def __init__(self, channel: socket.socket, out: int, results: int, *, limit_s: float, output_bytes: int) -> None:
        self._channel = channel
        self._written = {out: bytearray(), results: bytearray()}
        self._out, self._results = self._written.values()
        self._limit_s = limit_s
        self._output_bytes = output_bytes
        self._verdict: Verdict | None = None
        self._began = self._flooded = self._late = False
        self._deadline = time.monotonic() + START_LIMIT_S

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the run's current phase."""
        return max(0.0, self._deadline - time.monotonic())

    def read(self, descriptor: int) -> bool:
        """Read the next bytes from ``descriptor``; return True if no more bytes will come."""
        if descriptor not in self._written:
            message = self._channel.recv(256)
            if not message:
                raise ConnectionError("the warden died")
            self._verdict = Verdict(*json.loads(message))
            return True
        written, data = self._written[descriptor], os.read(descriptor, _CHUNK)
        if len(written) <= self._output_bytes:
            written += data
        elif not self._flooded:
            self._flooded = True
            self._channel.send(STOP)
        if not self._began and self._results.startswith(READY):
            self._began, self._deadline = True, time.monotonic() + self._limit_s
        return not data

    def look_at_clock(self) -> None:
        """Stop the run if it has exceeded its time limit.

        Raises TimeoutError if the warden did not begin the run, or did not stop it, in time.
        """
        if time.monotonic() < self._deadline:
            return
        if self._late or not self._began:
            raise TimeoutError("the warden does not answer")
        self._late, self._deadline = True, time.monotonic() + _PATIENCE_S
        self._channel.send(STOP)

    def outcome(self, nonce: str) -> Outcome:
        """Return the outcome. Call this after the warden has reported the end of the run."""
        verdict = self._verdict
        assert verdict is not None
        if not self._began:
            raise OSError(self._results.decode(errors="replace")[:300] or f"a run ended before it began ({verdict})")
        if self._late and verdict.ending == "signal":
            verdict = Verdict("time", verdict.status)
        return Outcome(verdict, bytes(self._out), self._flooded, _steps(bytes(self._results[len(READY) :]), nonce))


def _steps(reported: bytes, nonce: str) -> dict[int, Any]:
    """Return the value that each step reported in a run's report, by the step's index. Ignore lines without the nonce:
    the untrusted program wrote these, and the sandbox wrote the others."""
    values = {}
    for line in reported.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(line)
            if found["nonce"] == nonce:
                values[int(found["step"])] = found["value"]
    return values
