"""Pulling bytes across hosts: a small server beside the producer, and the client's ``pull``.

::

    request   b"PSB1" | u16 length of name | u64 generation | name
    reply     u8 status (0 found, 1 not found) | u64 nbytes | bytes
    receipt   one byte, sent by the client when it has everything

Blocking sockets in threads: a loop around ``recv_into`` reaches about 0.9 of what loopback TCP can do, asyncio streams
less than 0.2. The segment stays locked until the receipt, because ``sendfile`` hands the kernel the pages themselves:
rewriting them while they wait in a socket buffer would change what the peer reads.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import DeadlineError, NotFound, ProtocolError, Unavailable

__all__ = ["BlobServer", "BlobSource", "ServedBlob", "pull"]

MAGIC = b"PSB1"
_REQUEST = struct.Struct("<4sHQ")
_REPLY = struct.Struct("<BQ")
_IDLE_S = 60.0
_MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class ServedBlob:
    """Part of a file, constant while it is being served."""

    path: Path
    offset: int
    nbytes: int


BlobSource = Callable[[str, int], AbstractContextManager[ServedBlob]]
"""Finds a blob by name and generation and keeps it unchanged inside the ``with``; raises NotFound."""


class BlobServer:
    """Serves the blobs of one source on ``host``; ``address`` is what a peer needs."""

    def __init__(self, host: str, source: BlobSource) -> None:
        """Listen and start a thread.

        Raises:
            Unavailable: the address cannot be bound.
        """
        self._source = source
        try:
            self._listener = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        except OSError as error:
            raise Unavailable(f"cannot serve bulk data on '{host}' (PENSTOCK_BULK_HOST): {error}") from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=f"bulk-server-{self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, cut what is being sent, and wait for the threads."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(timeout=5.0)
        self._listener.close()
        with self._lock:
            peers = dict(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in peers.values():
            thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closing:
            self._slots.acquire()
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                self._slots.release()
                return
            thread = threading.Thread(target=self._serve, args=(peer,), name="bulk-peer", daemon=True)
            with self._lock:
                self._peers[peer] = thread
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.settimeout(_IDLE_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._answer(peer):
                pass
        except OSError:  # the peer went away or stood still; it will report that itself
            pass
        finally:
            with self._lock:
                self._peers.pop(peer, None)
            peer.close()
            self._slots.release()

    def _answer(self, peer: socket.socket) -> bool:
        """Answer one request; False when the peer is done or does not speak this protocol."""
        head = _receive(peer, _REQUEST.size)
        if len(head) < _REQUEST.size:
            return False
        magic, length, generation = _REQUEST.unpack(head)
        if magic != MAGIC:
            return False
        try:
            name = _receive(peer, length).decode()
            with self._source(name, generation) as blob, blob.path.open("rb", buffering=0) as file:
                peer.sendall(_REPLY.pack(0, blob.nbytes))
                if blob.nbytes:
                    peer.sendfile(file, blob.offset, blob.nbytes)
                return _receive(peer, 1) == b"\1"
        except (NotFound, UnicodeDecodeError, FileNotFoundError):
            peer.sendall(_REPLY.pack(1, 0))
            return True


def pull(address: str, name: str, generation: int, target: NDArray[np.uint8], *, timeout_s: float) -> None:
    """Fetch a blob into ``target``, uint8 [its size]; blocks. Memory that was used before is several times faster.

    Raises:
        NotFound: the producer does not have it any more.
        Unavailable: the producer cannot be reached or broke off.
        DeadlineError: not complete after ``timeout_s``.
        ProtocolError: the producer has another size under this name.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    what = f"{target.nbytes} bytes of '{name}' from {address}"
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(_REQUEST.pack(MAGIC, len(name.encode()), generation) + name.encode())
            reply = np.empty(_REPLY.size, np.uint8)
            _receive_into(peer, reply.data, deadline)
            status, size = _REPLY.unpack(reply.data)
            if status:
                raise NotFound(f"{address} does not have generation {generation} of '{name}' any more")
            if size != target.nbytes:
                raise ProtocolError(f"{address} has {size} bytes under '{name}', not {target.nbytes}")
            _receive_into(peer, target.data, deadline)
            peer.sendall(b"\1")
    except TimeoutError:
        raise DeadlineError(f"waited {timeout_s:.1f} s for {what}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise Unavailable(f"cannot fetch {what}: {error}") from None


def _receive(peer: socket.socket, nbytes: int) -> bytes:
    """Exactly ``nbytes`` bytes, or fewer if the peer closed."""
    data = b""
    while len(data) < nbytes:
        part = peer.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def _receive_into(peer: socket.socket, target: memoryview, deadline: float) -> None:
    while len(target):
        peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = peer.recv_into(target)
        if not count:
            raise ConnectionResetError("the producer closed the connection")
        target = target[count:]
