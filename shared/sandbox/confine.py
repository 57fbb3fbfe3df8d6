"""Drops the rights of a run permanently, in a fixed order: no step drops a right that a later step needs."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from penstock.shared.sandbox import kernel
from penstock.shared.sandbox.landlock import landlock_version, restrict_files
from penstock.shared.sandbox.plan import Plan
from penstock.shared.sandbox.seccomp import build_filter, install

__all__ = ["SCRATCH", "confine"]

SCRATCH = "/tmp"
"""Only directory in which a run with namespaces may write."""
_MAX_FILES = 64
_MAX_THREADS = 64
_WARDENS = 2
"""Number of Penstock's processes (warden and process 1) that count towards the process limit of a program with the
same user."""
_NOBODY = 65534
_PRIVATE_USERS = 0x40000000
"""Base of the user ids of runs; a run's user id is this base plus the process id of the handle. So processes that other
handles started have other users, and do not count towards the process limit of the run."""


def confine(plan: Plan, warden: int) -> None:
    """Apply limits, user, capabilities, file access and system-call filter to this process. ``warden`` is the id of the
    process that forked it.

    Raises:
        OSError: a layer of containment is not available; the program must not be started.
    """
    _limit(plan)
    if plan.mechanism == "namespaces" and os.geteuid() == 0:
        _become_nobody(plan.parent)
    kernel.no_new_privileges()
    kernel.drop_capabilities()
    kernel.stay_with_parent(warden)
    own_root = plan.mechanism == "namespaces"
    if landlock_version() > 0:
        writable = ["/dev/null", SCRATCH] if own_root else []
        restrict_files([*plan.readable, "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"], writable)
    elif not own_root:
        raise OSError("the kernel has no Landlock")
    install(build_filter(single=plan.single, read_only=not own_root, pid=os.getpid()))


def _limit(plan: Plan) -> None:
    limits = {
        resource.RLIMIT_AS: plan.memory_bytes,
        resource.RLIMIT_CPU: plan.cpu_s,
        resource.RLIMIT_FSIZE: plan.scratch_bytes,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    more = _MAX_THREADS if plan.single else plan.max_processes
    if plan.mechanism == "namespaces":
        limits[resource.RLIMIT_NPROC] = (0 if os.geteuid() == 0 else _WARDENS) + more
    else:  # all threads of the user count; the kernel sets no limit for root
        limits[resource.RLIMIT_NPROC] = _threads_of_user() + more
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


def _threads_of_user() -> int:
    """Return the number of threads that currently run under the user of this process."""
    user, found = os.getuid(), 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process ended meanwhile
            if entry.name.isdigit() and entry.stat().st_uid == user:
                found += sum(1 for _ in (entry / "task").iterdir())
    return found


def _become_nobody(number: int) -> None:
    """Change to a user id that owns no files and no other processes. If the container does not map such an id, change
    to the id of the user nobody."""
    os.setgroups([])
    for user in (_PRIVATE_USERS + number, _NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:
            continue
        return
    raise OSError("no user id to change to")
