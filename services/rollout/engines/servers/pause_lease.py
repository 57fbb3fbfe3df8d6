"""Lease on the pause of a server that the worker did not start: the server resumes if the worker dies during the pause.

A watchdog, a child process of the worker, keeps the lease: ``python pause_lease.py PARENT_PID URL``. It reads from a
pipe whether the server is paused. If the worker ends in a pause, by SIGKILL, too, the watchdog continues the server.
This file imports the standard library only, so the watchdog starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LIMIT_S", "PauseLease"]

LIMIT_S = 60.0
"""Seconds after which the watchdog gives up a server that does not respond."""
_CALL_S, _AGAIN_S, _POLL_S = 10.0, 1.0, 0.2
_NUM_ANSWERS = 2
"""Number of times that the server is continued: the worker's last request to pause may arrive after the first."""
_HELD, _FREE = b"1", b"0"


class PauseLease:
    """Watchdog of one server. Methods block only briefly, except ``close``, which waits for the watchdog to resume the
    server.

    Args:
        url: address to which the watchdog posts {} to continue the server.
        inherited: descriptors that the watchdog keeps open until it ends, so that their locks outlive the worker.
    """

    def __init__(self, url: str, inherited: Sequence[int] = ()) -> None:
        self._url, self._inherited = url, tuple(inherited)
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the watchdog; None if it does not run."""
        watchdog = self._watchdog
        return watchdog.pid if watchdog is not None and watchdog.poll() is None else None

    def hold(self) -> None:
        """Make the watchdog resume the server if this process ends before ``free``. Call this method before each pause.

        Raises:
            OSError: the watchdog does not start.
        """
        if self.pid is None:
            self._start()
        self._tell(_HELD)

    def free(self) -> None:
        """Tell the watchdog that the server has resumed. Safe to repeat."""
        if self.pid is not None:
            self._tell(_FREE)

    def close(self) -> None:
        """End the watchdog. If somebody holds the lease, the watchdog resumes the server before it ends. Safe to
        repeat."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is None:
            return
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        try:
            watchdog.wait(LIMIT_S + 2 * _CALL_S)
        except subprocess.TimeoutExpired:
            watchdog.kill()
            watchdog.wait()

    def _start(self) -> None:
        self.close()
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), self._url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=self._inherited,
            start_new_session=True,
        )  # fmt: skip
        assert self._watchdog.stdout is not None
        with self._watchdog.stdout as ready:
            if not select.select([ready], [], [], _CALL_S)[0] or not ready.read(1):
                self._watchdog.kill()
                self._watchdog.wait()
                raise OSError(f"the watchdog of the server at {self._url} did not start within {_CALL_S:g} s")

    def _tell(self, state: bytes) -> None:
        """Write to the pipe. The byte is in the kernel when this returns, and outlives this process."""
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(state)


def _watch(parent: int, url: str) -> None:
    """Wait until the parent closes the pipe or ends, then resume the server if it is paused.

    Only the pipe and the parent end the watchdog: a service manager that stops a group of processes, the worker among
    them, signals the watchdog as well.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b".")  # the parent waits for it before it pauses the server
    held = False
    while True:
        # A process that the parent forked may keep the pipe open.
        is_alive = os.getppid() == parent
        if select.select([0], [], [], _POLL_S)[0]:
            message = os.read(0, 4096)
            if not message:
                break
            held = message[-1:] == _HELD
        elif not is_alive:
            break
    if held:
        outcome = _continue(url)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the log may have ended with the worker
            sys.stderr.write(f"the rollout worker ended while the server at {url} was paused; {outcome}\n")


def _continue(url: str) -> str:
    """Resume the server, and return the outcome as text.

    A server that refuses connections has ended, and a new one is not paused.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"}, method="POST")
    num_answers, end, last = 0, time.monotonic() + LIMIT_S, "no answer"
    while time.monotonic() < end:
        try:
            with opener.open(request, timeout=_CALL_S):
                num_answers += 1
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", None), ConnectionRefusedError):
                return "the server has ended, too"
            last = str(error) or type(error).__name__
        if num_answers == _NUM_ANSWERS:
            return "it was continued"
        time.sleep(_AGAIN_S)
    return "it was continued" if num_answers else f"it was not continued within {LIMIT_S:g} s: {last}"


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
