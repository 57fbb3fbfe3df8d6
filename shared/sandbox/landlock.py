"""Landlock: drops all file access of a process except to listed directory trees
(https://docs.kernel.org/userspace-api/landlock.html)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from penstock.shared.sandbox.kernel import syscall

__all__ = ["landlock_version", "restrict_files"]

_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Bit mask of all file rights by version of the interface; later versions have the rights of version 5."""
_NET_RIGHTS = 0b11
"""Rights to bind and to connect over TCP, from version 4 of the interface."""
_SCOPES = 0b11
"""Scopes that deny abstract sockets of, and signals to, outside processes, from version 6 of the interface."""


def landlock_version() -> int:
    """Return the version of the Landlock interface; 0 if the kernel has none or it is disabled."""
    try:
        return syscall("landlock_create_ruleset", None, 0, _CREATE_VERSION)
    except (OSError, KeyError):
        return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Deny this process and its children access to files outside ``readable`` and ``writable``.

    Newer kernels also deny TCP, and signals and abstract sockets to other processes. Needs ``no_new_privileges``.
    Missing paths are ignored.

    Raises:
        OSError: the kernel refuses.
    """
    version = landlock_version()
    rights = _FILE_RIGHTS[min(version, 5)]
    attributes = struct.pack("=QQQ", rights, _NET_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = syscall("landlock_create_ruleset", attributes, size, 0)
    try:
        for paths, allowed in ((readable, _READING & rights), (writable, rights)):
            for path in paths:
                if Path(path).exists():
                    _allow(ruleset, path, allowed)
        syscall("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = rights if Path(path).is_dir() else rights & _ON_FILES
        rule = struct.pack("=Qi", allowed, descriptor)
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)
