"""Own mounts, network, process ids and host name for the warden, and a root directory with little in it."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.shared.sandbox import kernel
from penstock.shared.sandbox.confine import SCRATCH

__all__ = ["enter_namespaces", "fresh_scratch"]

_STAGE = "/proc"
"""The new root is put together here: it exists everywhere, and neither the warden nor a program needs it afterwards."""
_DEVICES = ("null", "zero", "urandom", "random")
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_INNER_USER = 1000


def enter_namespaces(readable: list[str]) -> None:
    """Leave the host's namespaces; only ``readable`` directories stay visible, read-only. The next child is process 1.

    Without root a user namespace is made, where the kernel allows it.

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
    kernel.pivot_root(".", ".")  # the old root now lies over the new one
    kernel.unmount(".")
    os.chdir("/")


def fresh_scratch(size_bytes: int, *, replace: bool) -> None:
    """An empty directory in memory for the next run; ``replace`` removes that of the last."""
    if replace:
        kernel.unmount(SCRATCH)
    kernel.mount("scratch", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={size_bytes},mode=1777")


def _unshared(spaces: int) -> bool:
    """False where this root may not (a container without the capability): a user namespace may still be possible."""
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
