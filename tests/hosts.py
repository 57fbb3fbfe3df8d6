"""Several hosts on one machine: network namespaces, joined by a bridge in another namespace. Needs root and ``ip``.

The namespaces share the file system, /dev/shm and process ids. They count as hosts because each has its own network and
host id.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["Hosts", "can_make_hosts"]


def can_make_hosts() -> bool:
    """Return True if this process may create network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"try-{secrets.token_hex(3)}"
    created = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    if created:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return created


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


class Hosts:
    """``num`` hosts, numbered from 1; host ``k`` has the address ``address(k)``."""

    def __init__(self, num: int) -> None:
        self._net = f"ps{secrets.token_hex(3)}"
        self._num = num
        self._switch = f"{self._net}-sw"
        _ip(f"netns add {self._switch}")
        _ip(f"-n {self._switch} link add br0 type bridge stp_state 0 forward_delay 0")
        _ip(f"-n {self._switch} link set br0 up")
        for host in range(1, num + 1):
            space = self._space(host)
            _ip(f"netns add {space}")
            _ip(f"-n {space} link set lo up")
            _ip(f"-n {self._switch} link add p{host} type veth peer name eth0 netns {space}")
            _ip(f"-n {self._switch} link set p{host} master br0")
            _ip(f"-n {self._switch} link set p{host} up")
            _ip(f"-n {space} addr add {self.address(host)}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"10.98.0.{host}"

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host and return its process."""
        return subprocess.Popen(["ip", "netns", "exec", self._space(host), *command], text=True, **options)

    def slow(self, host: int, rate: str) -> None:
        """Limit the rate at which a host sends; ``rate`` is, for example, ``200mbit``."""
        rule = f"qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 50ms"
        subprocess.run(["ip", "netns", "exec", self._space(host), "tc", *rule.split()], check=True)

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host, without an error on either side."""
        _ip(f"-n {self._switch} link set p{host} nomaster")

    def heal(self, host: int) -> None:
        """Undo ``cut``."""
        _ip(f"-n {self._switch} link set p{host} master br0")

    def received_bytes(self, host: int) -> int:
        """Return how many bytes a host has received over its network so far."""
        command = ["ip", "netns", "exec", self._space(host), "cat", "/proc/net/dev"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return int(next(line.split()[1] for line in lines if line.strip().startswith("eth0:")))

    def close(self) -> None:
        """Remove the namespaces. Processes in them continue without a network."""
        for host in range(1, self._num + 1):
            _ip(f"netns del {self._space(host)}")
        _ip(f"netns del {self._switch}")
        for host in range(1, self._num + 1):
            shutil.rmtree(Path("/etc/netns") / self._space(host), ignore_errors=True)

    def _space(self, host: int) -> str:
        return f"{self._net}-h{host}"
