"""Warden: a process that confines itself once, then forks one process per run and kills all processes that a run leaves
behind.

``sandbox.py`` starts the warden with a fixed environment. With namespaces, its child is process 1 of a
process-id namespace, so that one signal kills everything that a program started. The warden never reads programs or
tests: it passes on their file descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from penstock.shared.sandbox import kernel
from penstock.shared.sandbox.confine import SCRATCH
from penstock.shared.sandbox.plan import STOP, Plan, Verdict
from penstock.shared.sandbox.runner import run

__all__ = ["enter_namespaces", "fresh_scratch", "main"]


_STAGE = "/proc"
"""Mount point at which the new root is assembled: this directory exists on every host, and is not needed afterwards."""
_DEVICES = ("null", "zero", "urandom", "random")
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_INNER_USER = 1000


def enter_namespaces(readable: list[str]) -> None:
    """Leave the host's namespaces. Of the host's directories, only those in ``readable`` stay visible, and they are
    read-only. The next child is process 1.

    Without the rights of root, the process also enters a new user namespace, if the kernel allows that.

    Raises:
        OSError: the kernel or the container refuses.
    """
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID
    if not (os.geteuid() == 0 and _unshared(spaces)):
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(spaces | kernel.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), *(_mappings(user, group))):
            Path(f"/proc/self/{name}").write_text(text)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in readable:
        _show(path)
    for path in _LINKS:
        if Path(path).is_symlink():
            Path(_STAGE + path).symlink_to(Path(path).readlink())
    Path(f"{_STAGE}/dev").mkdir()
    for name in _DEVICES:
        Path(f"{_STAGE}/dev/{name}").touch()
        kernel.mount(f"/dev/{name}", f"{_STAGE}/dev/{name}", None, kernel.MS_BIND)
    Path(_STAGE + SCRATCH).mkdir(parents=True, exist_ok=True)
    kernel.protect_mounts(_STAGE, below=False)
    os.chdir(_STAGE)
    kernel.pivot_root(".", ".")  # the old root is now mounted over the new one
    kernel.unmount(".")
    os.chdir("/")


def fresh_scratch(size_bytes: int, *, replace: bool) -> None:
    """Mount an empty in-memory directory for the next run; ``replace``: first unmount the directory of the last run."""
    if replace:
        kernel.unmount(SCRATCH)
    kernel.mount("scratch", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={size_bytes},mode=1777")


def _unshared(spaces: int) -> bool:
    """Enter new namespaces of the kinds ``spaces``. Return False if this process lacks the right; then a user namespace
    may still work. Even root lacks the right in a container without the capability."""
    try:
        kernel.unshare(spaces)
    except PermissionError:
        return False
    return True


def _mappings(user: int, group: int) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("uid_map", f"{_INNER_USER} {user} 1"), ("gid_map", f"{_INNER_USER} {group} 1")


def _show(path: str) -> None:
    target = Path(_STAGE + path)
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    kernel.mount(path, str(target), None, kernel.MS_BIND | kernel.MS_REC)
    kernel.protect_mounts(str(target), below=True)


_OFTEN_IMPORTED = (
    *("abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq"),
    *("io", "itertools", "math", "operator", "random", "re", "statistics", "string", "typing"),
)
"""Modules imported before the fork, so that programs start faster."""
_NUM_DESCRIPTORS = 4


def main(descriptor: int, plan_json: str) -> None:
    """Execute the runs that the handle requests over a socket, until the handle closes the socket. First send '' when
    the warden is ready, or else the reason why containment is impossible."""
    channel, plan = socket.socket(fileno=descriptor), Plan(*json.loads(plan_json))
    sys.path += plan.packages
    try:
        for name in (*_OFTEN_IMPORTED, *plan.preload):
            importlib.import_module(name)
        if plan.mechanism == "namespaces":
            enter_namespaces(plan.readable)
    except (OSError, KeyError, ImportError) as error:
        channel.send(json.dumps(getattr(error, "strerror", None) or str(error)).encode())
        return
    if plan.mechanism == "namespaces":
        if child := os.fork():
            channel.close()
            kernel.stay_with_parent(plan.parent)
            os.waitpid(child, 0)
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps signals without a handler from process 1
        kernel.stay_with_parent(0)  # a parent outside of the namespace has process id 0
    else:
        kernel.stay_with_parent(plan.parent)
    channel.send(json.dumps("").encode())
    gc.freeze()
    _serve(channel, plan)


def _serve(channel: socket.socket, plan: Plan) -> None:
    first = True
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 64, _NUM_DESCRIPTORS)
        if not message:
            return
        if message == STOP:  # the run had already ended
            continue
        if plan.mechanism == "namespaces":
            fresh_scratch(plan.scratch_bytes, replace=not first)
            first = False
        warden = os.getpid()
        child = os.fork()
        if child == 0:
            run(plan, descriptors, warden)
        for descriptor in descriptors:
            os.close(descriptor)
        verdict = _wait(child, channel)
        if plan.mechanism == "namespaces":
            _end_all()
        channel.send(json.dumps(verdict).encode())


def _wait(child: int, channel: socket.socket) -> Verdict:
    """Wait until the run ends, or kill it if the handle requests a stop; return how the run ended."""
    poll = select.poll()
    ended = os.pidfd_open(child)
    try:
        poll.register(ended, select.POLLIN)
        poll.register(channel, select.POLLIN)
        numbers = [number for number, _ in poll.poll()]
    finally:
        os.close(ended)
    if ended not in numbers:
        os.kill(child, signal.SIGKILL)
        channel.recv(len(STOP))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Verdict("exit", code) if code >= 0 else Verdict("signal", -code)


def _end_all() -> None:
    """Kill and reap all other processes of this namespace."""
    assert os.getpid() == 1, "outside a namespace of its own this would end everything"
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped:
            time.sleep(0.001)
