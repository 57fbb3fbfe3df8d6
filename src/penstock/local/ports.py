"""Ports: free ones, and taken ones named before anything starts."""

from __future__ import annotations

import socket

from penstock.shared.errors import ConfigError

__all__ = ["claimable", "free_ports"]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports that nobody listens on at the moment."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def claimable(host: str, port: int) -> None:
    """Raise ConfigError if the API could not listen there."""
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
