"""Finds free ports, and checks before the start of a deployment that its API can listen on its port."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from penstock.shared.errors import ConfigError

__all__ = ["claimable", "free_ports"]


LOWEST, EPHEMERAL = 20_000, Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 200


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ``count`` different ports without a listener at the moment.

    They are below the kernel's range for outgoing connections, which could take a port before the caller listens on it.
    """
    probes: list[socket.socket] = []
    try:
        while len(probes) < count:
            probes.append(_bound(host))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _bound(host: str) -> socket.socket:
    """Return a socket bound to a free port below the ephemeral ports; if none is found, to an ephemeral port."""
    try:
        stop = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        stop = LOWEST
    for port in random.SystemRandom().sample(range(LOWEST, stop), min(TRIES, stop - LOWEST)) if stop > LOWEST else ():
        probe = socket.socket()
        try:
            probe.bind((host, port))
        except OSError:
            probe.close()
        else:
            return probe
    probe = socket.socket()
    probe.bind((host, 0))
    return probe


def claimable(host: str, port: int) -> None:
    """Raise ConfigError if the API cannot listen on ``host`` and ``port``."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on '{host}': {error.strerror or error}") from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} is not free ({error.strerror}): choose another with --port, or see who has it "
                f"with: ss -ltnp 'sport = :{port}'"
            ) from None
