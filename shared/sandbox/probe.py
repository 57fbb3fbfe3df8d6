"""Proof by trying: a program that attempts what a sandbox must prevent."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.shared.sandbox.plan import Job

__all__ = ["breaches"]

_PROGRAM = """
import os, socket

def attempt(what, action):
    try:
        action()
    except (OSError, ValueError):
        return []
    return [what]

def read(path):
    with open(path, "rb") as file:
        assert file.read(1)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def breaches(folder, port, parent):
    here = ("127.0.0.1", port)
    return [
        *attempt("open a TCP connection", lambda: socket.create_connection(here, 2)),
        *attempt("send a datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", here)),
        *attempt("reach a local socket", lambda: socket.socket(socket.AF_UNIX).connect(folder + "/socket")),
        *attempt("read a file outside", lambda: read(folder + "/secret")),
        *attempt("write over a file outside", lambda: write(folder + "/secret")),
        *attempt("write a new file outside", lambda: write(folder + "/new")),
        *attempt("remove a file outside", lambda: os.unlink(folder + "/secret")),
        *attempt("change a file's mode outside", lambda: os.chmod(folder + "/secret", 0o777)),
        *attempt("read the environment of its parent", lambda: read(f"/proc/{parent}/environ")),
        *(attempt("signal its parent", lambda: os.kill(parent, 0)) if parent > 2 else []),
    ]
"""


def breaches(run: Callable[[Job], dict[int, Any]]) -> list[str]:
    """Forbidden things that a program could do, found by running one; empty where containment holds."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as local:
        secret = Path(folder, "secret")
        secret.write_text("secret")
        secret.chmod(0o666)
        Path(folder).chmod(0o777)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        local.bind(f"{folder}/socket")
        local.listen()
        attempt = {"call": "breaches", "args": [folder, tcp.getsockname()[1], os.getpid()], "kwargs": {}}
        steps = run(Job(_PROGRAM, [attempt], secrets.token_hex(8)))
    found = steps.get(0)
    return found if isinstance(found, list) else ["end the proof before it was given"]
