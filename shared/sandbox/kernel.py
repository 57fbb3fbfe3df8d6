"""System calls for containment that Python does not provide. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

__all__ = [
    "MACHINE",
    "drop_capabilities",
    "mount",
    "no_new_privileges",
    "pivot_root",
    "prctl",
    "protect_mounts",
    "stay_with_parent",
    "syscall",
    "unmount",
    "unshare",
]

MACHINE = platform.machine()
"""Machine type; `x86_64` and `aarch64` are supported."""

MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x1, 0x2
_CAPABILITY_VERSION_3 = 0x20080522
_NUMBERS = {
    "pivot_root": {"x86_64": 155, "aarch64": 41},
    "capset": {"x86_64": 126, "aarch64": 91},
    "seccomp": {"x86_64": 317, "aarch64": 277},
    "mount_setattr": {"x86_64": 442, "aarch64": 442},
    "landlock_create_ruleset": {"x86_64": 444, "aarch64": 444},
    "landlock_add_rule": {"x86_64": 445, "aarch64": 445},
    "landlock_restrict_self": {"x86_64": 446, "aarch64": 446},
}

_libc = ctypes.CDLL(None, use_errno=True)


class _Capabilities(ctypes.Structure):
    """Argument of capset: its header, and two words for each of the three capability sets."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int32), ("sets", ctypes.c_uint32 * 6))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def syscall(name: str, *arguments: object) -> int:
    """Make the system call ``name``, one of ``_NUMBERS``, and return its result.

    Raises:
        OSError: the kernel refuses.
    """
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(_NUMBERS[name][MACHINE]), *values), name)


def unshare(flags: int) -> None:
    """Move this process, or with CLONE_NEWPID its later children, to new namespaces of the kinds ``flags``.

    Raises OSError.
    """
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount ``source`` at ``target``. Raises OSError."""
    kind_bytes = kind.encode() if kind else None
    result = _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount, which is removed when no longer in use. Raises OSError."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def protect_mounts(target: str, *, below: bool) -> None:
    """Make a mount read-only and ignore set-user-id bits on it; with ``below``, also on all mounts below it. Raises
    OSError."""
    change = _MountAttributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if below else 0
    syscall("mount_setattr", _AT_FDCWD, target.encode(), flags, ctypes.byref(change), ctypes.sizeof(change))


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root file system, and mount the previous one at ``old``. Raises OSError."""
    syscall("pivot_root", new.encode(), old.encode())


def prctl(option: int, value: int) -> None:
    """Call prctl with one value. Raises OSError."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def no_new_privileges() -> None:
    """Prevent this process and its children from gaining rights by executing programs. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop every capability of this process. The loss is permanent only if ``no_new_privileges`` is called too. Raises
    OSError."""
    state = _Capabilities(_CAPABILITY_VERSION_3, 0)
    data = ctypes.addressof(state) + _Capabilities.sets.offset
    syscall("capset", ctypes.byref(state), ctypes.c_void_p(data))


def stay_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Call after changes of user or capabilities, which would
    undo this setting."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
