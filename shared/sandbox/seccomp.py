"""System-call filter (seccomp) for contained programs.

Denied calls fail with an error that the program sees; calls newer than ``_LAST_KNOWN`` fail as unimplemented.
https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import struct
from dataclasses import dataclass
from typing import Literal

from penstock.shared.sandbox.kernel import MACHINE, syscall

__all__ = ["build_filter", "install"]

_SET_MODE_FILTER, _TSYNC = 1, 1
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_LAST_KNOWN = 450
"""Number of the newest system call that the filter knows (set_mempolicy_home_node, Linux 5.17)."""
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000
"""Bit mask of all CLONE_NEW flags of clone."""
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000
"""Bit mask of the flags of open that allow changes: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""
_PR_SET_PDEATHSIG = 1

Numbers = dict[str, tuple[int, int | None]]
"""System call -> its number on x86_64 and on aarch64 (None: the call does not exist there)."""

_NETWORK: Numbers = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201), "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
_OTHER_PROCESSES: Numbers = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
}  # fmt: skip
_KERNEL: Numbers = {
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "mount": (165, 40), "umount2": (166, 39),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "move_mount": (429, 429), "open_tree": (428, 428), "mount_setattr": (442, 442), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "personality": (135, 92), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "vhangup": (153, 58), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18),
    "uselib": (134, None),
}  # fmt: skip
_MEMORY_OUTSIDE_LIMITS: Numbers = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
_PROCESSES: Numbers = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_FILE_CHANGES: Numbers = {
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
_ABSENT: Numbers = {"clone3": (435, 435), "openat2": (437, 437)}
"""System calls that fail as if the kernel lacked them, because a filter cannot read their arguments in memory. Callers
then use clone and openat."""


@dataclass(frozen=True, slots=True)
class _Condition:
    """Rule that makes the system call ``call`` fail with ``error`` if its argument number ``argument`` (from 0) passes
    a ``test``. `any` and `none`: the argument has any or none of the bits of ``value``; `equal` and `differs`: it
    equals ``value`` or differs from it."""

    call: tuple[int, int | None]
    argument: int
    test: Literal["any", "none", "equal", "differs"]
    value: int
    error: int
    high: bool = False
    """True: test the upper 32 bits of the argument; False: the lower 32 bits."""


def build_filter(*, single: bool, read_only: bool, pid: int) -> bytes:
    """Build the filter program. ``single``: deny further processes, and signals except to ``pid``; ``read_only``: deny
    changes of files.

    Raises:
        KeyError: the system call numbers of this machine type are unknown.
    """
    arch, column = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}[MACHINE]
    code = [_op(_LOAD, _ARCH_AT), _op(_EQUAL, arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER_AT)]
    if MACHINE == "x86_64":  # the x32 numbers would pass every test below
        code += [_op(_GREATER, 0x3FFFFFFF, 0, 1), _op(_RETURN, _KILL)]
    code += [_op(_GREATER, _LAST_KNOWN, 0, 1), _refuse(errno.ENOSYS)]
    denied = dict.fromkeys(_NETWORK.values(), errno.EACCES) | dict.fromkeys(_ABSENT.values(), errno.ENOSYS)
    denied |= dict.fromkeys([*(_OTHER_PROCESSES | _KERNEL | _MEMORY_OUTSIDE_LIMITS).values()], errno.EPERM)
    denied |= dict.fromkeys(_PROCESSES.values(), errno.EPERM) if single else {}
    denied |= dict.fromkeys(_FILE_CHANGES.values(), errno.EROFS) if read_only else {}
    for numbers, error in denied.items():
        if (number := numbers[column]) is not None:
            code += [_op(_EQUAL, number, 0, 1), _refuse(error)]
    for condition in _conditions(single=single, read_only=read_only, pid=pid):
        code += _compiled(condition, column)
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def install(program: bytes) -> None:
    """Apply the filter to this process and its children, permanently. Needs ``no_new_privileges``. Raises OSError."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    syscall("seccomp", _SET_MODE_FILTER, _TSYNC, header)


def _conditions(*, single: bool, read_only: bool, pid: int) -> list[_Condition]:
    found = [
        _Condition((56, 220), 0, "any", _CLONE_NAMESPACES, errno.EPERM),
        # An address to send to: a socket pair must not reach a socket outside.
        _Condition((44, 206), 4, "differs", 0, errno.EACCES),
        _Condition((44, 206), 4, "differs", 0, errno.EACCES, high=True),
        _Condition((302, 261), 0, "differs", 0, errno.EPERM),  # prlimit64 of other processes
        _Condition((157, 167), 0, "equal", _PR_SET_PDEATHSIG, errno.EPERM),
    ]
    if single:
        found += [
            _Condition((56, 220), 0, "none", _CLONE_THREAD, errno.EPERM),
            _Condition((62, 129), 0, "differs", pid, errno.EPERM),  # kill
            _Condition((234, 131), 0, "differs", pid, errno.EPERM),  # tgkill
            # Signals by way of a descriptor's owner: fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX; ioctl FIOSETOWN, SIOCSPGRP.
            *(_Condition((72, 25), 1, "equal", command, errno.EPERM) for command in (8, 10, 15)),
            *(_Condition((16, 29), 1, "equal", request, errno.EPERM) for request in (0x8901, 0x8902)),
        ]
    if read_only:
        found += [
            _Condition((2, None), 1, "any", _WRITING, errno.EROFS),  # open
            _Condition((257, 56), 2, "any", _WRITING, errno.EROFS),  # openat
        ]
    return found


def _compiled(condition: _Condition, column: int) -> list[bytes]:
    number = condition.call[column]
    if number is None:
        return []
    kind = _ANY_BIT if condition.test in ("any", "none") else _EQUAL
    when_true, when_false = (0, 1) if condition.test in ("any", "equal") else (1, 0)
    word = _ARGUMENTS_AT + 8 * condition.argument + (4 if condition.high else 0)
    return [
        _op(_LOAD, _NUMBER_AT),
        _op(_EQUAL, number, 0, 3),
        _op(_LOAD, word),
        _op(kind, condition.value, when_true, when_false),
        _refuse(condition.error),
    ]


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)


def _op(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, when_true, when_false, value)
