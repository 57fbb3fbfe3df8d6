"""Processes that run code of users. They end when their service ends, and can be killed together with all processes
that they started.

A trial is such a process. ``run_trial`` starts ``python -m MODULE FD PARENT``, whose ``main`` calls ``serve_trial``.
Messages over FD are length-prefixed msgpack; output of user code goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.trials import Finding, TrialReply, TrialRequest

__all__ = ["Attempts", "described", "die_with", "kill_group", "run_trial", "serve_trial", "start_with_channel"]

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_EXIT_LIMIT_S = 5.0
_MAX_CHARS = 600
_FOLDERS = [Path(__file__).parents[1], Path(__file__).parents[1].with_name("services")]
_OWN = tuple(str(folder) for each in _FOLDERS for folder in {each, each.resolve()})
"""Paths of Penstock's folders, as imported and with links resolved."""
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_PACKAGES = f"{os.sep}site-packages{os.sep}"


class _Doing(msgspec.Struct, frozen=True, kw_only=True, tag="doing"):
    """Message from a trial process before each action: it is about to do ``what`` with the user code under ``key``.
    ``fatal`` is as in ``Attempts.at``."""

    key: str
    what: str
    fatal: bool


class _Done(msgspec.Struct, frozen=True, tag="done"):
    """Message from a trial process: the trial has ended."""


# -- the service -------------------------------------------------------------------------------------------------------


async def run_trial(module: str, request: TrialRequest) -> TrialReply:
    """Run a trial in a separate process, which is killed at its time limit, and return the findings.

    Raises:
        Unavailable: the sender of the request no longer waits, or no process can be started.
    """
    if bus_time() > request.start_by:
        raise Unavailable("nobody waits for this trial any more")
    try:
        process, channel = await start_with_channel(lambda fd: (sys.executable, "-m", module, fd, str(os.getpid())))
    except OSError as error:
        raise Unavailable(f"no process can be started for the trial: {error}") from None
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    try:
        writer.write(_encode(request))
        return TrialReply(findings=await _findings(reader, process, request.limit_s))
    finally:
        writer.transport.abort()
        await kill_group(process)


async def start_with_channel(
    command: Callable[[str], Sequence[str]],
    *,
    env: Mapping[str, str] | None = None,
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a process for user code that inherits one end of a pair of sockets.

    Args:
        command: function from the descriptor of the socket in the new process to the arguments of the process.
        env: environment variables of the process; None: the variables of this process.
        kind: socket type of the pair.

    Returns:
        The process, which leads a group of its own for ``kill_group``, and our end of the pair, which does not block.

    Raises:
        OSError: the process does not start.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        process = await asyncio.create_subprocess_exec(
            *command(str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # output of user code goes to the log
            env=env,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        undo.pop_all()
    ours.setblocking(False)
    return process, ours


async def _findings(reader: asyncio.StreamReader, process: asyncio.subprocess.Process, limit_s: float) -> list[Finding]:
    """Return all findings of a trial. If the trial hangs or dies, add a finding that names its last action."""
    found: list[Finding] = []
    doing = _Doing(key="", what="starting a process", fatal=False)
    decoder = msgspec.msgpack.Decoder(_Doing | Finding | _Done)
    try:
        async with asyncio.timeout(limit_s):
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                match decoder.decode(await reader.readexactly(size)):
                    case _Doing() as doing:
                        continue
                    case Finding() as finding:
                        found.append(finding)
                    case _:
                        return found
    except TimeoutError:
        text = f"{doing.what} was not over after {limit_s:g} s, when the trial ended"
        return [*found, Finding(key=doing.key, text=text, fatal=False)]
    except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
        text = f"{doing.what} ended the process{await _exit_text(process)}"
        return [*found, Finding(key=doing.key, text=text, fatal=doing.fatal)]


async def _exit_text(process: asyncio.subprocess.Process) -> str:
    try:
        async with asyncio.timeout(_EXIT_LIMIT_S):
            code = await process.wait()
    except TimeoutError:
        return ""
    return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with exit status {code}"


async def kill_group(process: asyncio.subprocess.Process) -> None:
    """Send SIGKILL to a process and its process group, and wait for the end of the process."""
    with contextlib.suppress(ProcessLookupError):  # the whole group has just ended
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_LIMIT_S):
            await process.wait()


# -- the process that runs code of users -------------------------------------------------------------------------------


class Attempts:
    """Runs the actions of a trial that execute user code, and reports the start and any failure of each action."""

    def __init__(self, service: str, send: Callable[[_Doing | Finding], None]) -> None:
        self._service, self._send = service, send

    def at(self, key: str, what: str, action: Callable[[], Any], *, fatal: bool, advice: str = "") -> tuple[bool, Any]:
        """Run ``action``, which runs user code. Return True and its result; False and None if it raised.

        Args:
            key: key of the job file that names the code.
            what: subject of the message about a failure.
            fatal: the job cannot run if ``action`` raises.
            advice: end of the message about a failure.
        """
        self._send(_Doing(key=key, what=what, fatal=fatal))
        try:
            return True, action()
        except PenstockError as error:
            text = f"{error}{_place(error.__cause__)}"
        except (Exception, SystemExit) as error:  # user code may raise anything
            text = described(what, error)
            if isinstance(error, ModuleNotFoundError):
                advice = f"; install what has '{error.name}' beside the {self._service} service"
        self._send(Finding(key=key, text=f"{text}{advice}", fatal=fatal))
        return False, None


def serve_trial(service: str, try_out: Callable[[TrialRequest, Attempts], None]) -> NoReturn:
    """Run one trial in this process, then exit. ``run_trial`` starts this process with a module whose ``main`` calls
    this function. ``service``: name of the service that called ``run_trial``."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # a child process of user code must not keep the channel open
    die_with(parent, service)
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as reading:
        (size,) = _LENGTH.unpack(reading.read(_LENGTH.size))
        request = msgspec.msgpack.decode(reading.read(size), type=TrialRequest)
        try_out(request, Attempts(service, lambda message: channel.sendall(_encode(message))))
        channel.sendall(_encode(_Done()))
    sys.stdout.flush()
    os._exit(0)  # threads of user code may run on


def die_with(parent: int, service: str) -> None:
    """Make the kernel kill this process (SIGKILL) when ``parent`` dies. User code that hangs would not notice a closed
    channel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the {service} service is gone")


def described(what: str, error: BaseException) -> str:
    """Return the text of an exception of user code, with its file and line in that code if they are known."""
    return f"{what} raised {type(error).__name__}: {error}"[:_MAX_CHARS] + _place(error)


def _place(error: BaseException | None) -> str:
    """Return `` (FILE, line NUMBER)`` for the innermost frame of ``error`` in user code, or else in an installed
    package; '' if there is no such frame."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    outside = [frame for frame in frames if not frame.filename.startswith(("<", *_OWN))]
    written = [f for f in outside if _PACKAGES not in f.filename and not f.filename.startswith(_STANDARD)]
    for frame in reversed(written or [f for f in outside if _PACKAGES in f.filename]):
        return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _encode(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body
