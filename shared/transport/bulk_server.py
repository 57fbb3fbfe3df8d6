"""Transfer of blobs across hosts: a small server at the producer, and the client's ``pull``.

::

    greeting  b"PSB3" | 16 random bytes (nonce)
    request   b"PSB3" | u16 length of name | u64 generation | proof | name
    reply     u8 status (0 found, 1 not found, 2 refused) | u64 nbytes | bytes | seal
    receipt   one byte, sent by the client after the last byte

Each blob has a token, which its claim or manifest carries over the bus. ``proof`` is the HMAC-SHA256 of nonce and
request under that token, so that only recipients of the claim can pull. A ``?`` in a name begins a request for
something that the producer makes of the blob, to which the same token entitles. ``seal`` is the GMAC (NIST SP 800-38D)
of the bytes under a key that both derive from token and nonce, so that nobody on the path can change them. The bytes
themselves are encrypted if ``PENSTOCK_BULK_TLS_*`` is set: then all of the above goes through TLS, and with a CA file
(``PENSTOCK_BULK_TLS_CA``) both ends authenticate by certificate.

Blocking sockets in threads: a loop around ``recv_into`` reaches about 0.9 of loopback TCP's throughput, asyncio streams
less than 0.2. The segment stays locked until the receipt, because ``sendfile`` passes the pages themselves to the
kernel: rewriting them while they wait in a socket buffer would change the bytes that the peer reads.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from penstock.shared.errors import DeadlineError, NotFound, ProtocolError, Unavailable

__all__ = ["BlobServer", "BlobSource", "ServedBlob", "pull"]

MAGIC = b"PSB3"
_NONCE_BYTES, _MAC_BYTES, _SEAL_BYTES, _IV_BYTES = 16, 32, 16, 12
_REQUEST = struct.Struct("<4sHQ32s")
_REPLY = struct.Struct("<BQ")
_FOUND, _NOT_FOUND, _REFUSED = 0, 1, 2
_IDLE_S = 15.0
"""Timeout of a peer that reads nothing (seconds)."""
_PROOF_S = 5.0
"""Time limit for a peer to send its request, which proves that it knows the token (seconds)."""
_MAX_CONNECTIONS = 64
_MAX_UNPROVEN = 64
"""Largest number of connected peers that have not sent a valid proof yet. Above it the server disconnects the oldest
unproven peer, so that strangers cannot block other peers."""
_CHUNK = 4 << 20
_PIECE = 1 << 20
"""Bytes received at a time: few enough to be in a cache while they are checked."""
_BESIDE = 8 << 20
"""Size (bytes) above which a second thread computes the seal of a blob while it is sent or received."""


@dataclass(frozen=True, slots=True)
class ServedBlob:
    """Part of a file that stays constant while it is served. ``data`` has its bytes if the producer has mapped them."""

    path: Path
    offset: int
    nbytes: int
    data: NDArray[np.uint8] | None = None


BlobSource = Callable[[str, int], AbstractContextManager[ServedBlob]]
"""Finds a blob by name and generation and keeps it unchanged inside the ``with``; raises NotFound."""


class BlobServer:
    """Serves the blobs of one source on ``host``; peers connect to ``address``."""

    def __init__(self, host: str, source: BlobSource, tls: ssl.SSLContext | None = None) -> None:
        """Listen on ``host``, and start the thread that accepts connections.

        Raises:
            Unavailable: the address cannot be bound.
        """
        self._source, self._tls = source, tls
        try:
            self._listener = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        except OSError as error:
            raise Unavailable(f"cannot serve bulk data on '{host}' (PENSTOCK_BULK_HOST): {error}") from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._secret = secrets.token_bytes(_MAC_BYTES)
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._unproven: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=f"bulk-server-{self.address}", daemon=True)
        self._thread.start()

    def token(self, name: str, generation: int) -> str:
        """Return the token, in hex, that a peer needs to pull the blob ``name``. The part of ``name`` after a ``?``
        does not change the token."""
        return _mac(self._secret, generation.to_bytes(8, "little"), name.partition("?")[0].encode()).hex()

    def close(self) -> None:
        """Stop listening, abort running transfers, and wait for the threads."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(timeout=5.0)
        self._listener.close()
        with self._lock:
            peers = dict(self._peers)
        for peer in peers:
            _cut(peer)
        for thread in peers.values():
            thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._tls is not None:
                try:  # the thread of this peer does the TLS handshake
                    peer = self._tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
                except OSError:  # the peer disconnected already
                    peer.close()
                    continue
            thread = threading.Thread(target=self._serve, args=(peer,), name="bulk-peer", daemon=True)
            with self._lock:
                self._peers[peer] = thread
                self._unproven[peer] = None
                oldest = next(iter(self._unproven)) if len(self._unproven) > _MAX_UNPROVEN else None
            if oldest is not None:
                _cut(oldest)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answer(peer)
        except (OSError, UnicodeDecodeError):  # the peer disconnected, stalled or speaks another protocol
            pass
        finally:
            with self._lock:
                self._peers.pop(peer, None)
                self._unproven.pop(peer, None)
            peer.close()

    def _answer(self, peer: socket.socket) -> None:
        """Read one request and answer it."""
        nonce, deadline = secrets.token_bytes(_NONCE_BYTES), time.monotonic() + _PROOF_S
        peer.settimeout(_PROOF_S)
        if isinstance(peer, ssl.SSLSocket):
            peer.do_handshake()
        peer.sendall(MAGIC + nonce)
        head = bytearray(_REQUEST.size)
        _receive_into(peer, memoryview(head), deadline)
        magic, length, generation, proof = _REQUEST.unpack(head)
        if magic != MAGIC:
            return
        text = bytearray(length)
        _receive_into(peer, memoryview(text), deadline)
        name = text.decode()
        token = bytes.fromhex(self.token(name, generation))
        peer.settimeout(_IDLE_S)
        if not hmac.compare_digest(proof, _proof(token, nonce, name, generation)):
            peer.sendall(_REPLY.pack(_REFUSED, 0))
            return
        with self._lock:
            self._unproven.pop(peer, None)
        with self._slots:
            try:
                self._send(peer, name, generation, _Seal(token, nonce))
            except (NotFound, FileNotFoundError):
                peer.sendall(_REPLY.pack(_NOT_FOUND, 0))

    def _send(self, peer: socket.socket, name: str, generation: int, seal: _Seal) -> None:
        with self._source(name, generation) as blob, blob.path.open("rb", buffering=0) as file:
            peer.sendall(_REPLY.pack(_FOUND, blob.nbytes))
            with _mapped(blob, file) as data:

                def add(start: int) -> None:
                    with data[start : start + _CHUNK] as piece:
                        seal.add(piece)

                with _in_order(blob.nbytes) as beside:
                    for start in range(0, blob.nbytes, _CHUNK):
                        beside(add, start)
                        peer.sendfile(file, blob.offset + start, min(_CHUNK, blob.nbytes - start))
            peer.sendall(seal.digest())
            _receive(peer, 1)


@contextlib.contextmanager
def _mapped(blob: ServedBlob, file: IO[bytes]) -> Iterator[memoryview]:
    """Yield the bytes of a blob: ``blob.data`` if the producer has it, else a mapping of ``file``."""
    if blob.data is not None:
        with blob.data.data as data:
            yield data
        return
    end = blob.offset + blob.nbytes
    if not blob.nbytes:
        yield memoryview(b"")
        return
    with (
        mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as pages,
        memoryview(pages) as whole,
        whole[blob.offset :] as data,
    ):
        yield data


class _Seal:
    """GMAC (authentication code) of bytes that arrive in pieces. Each key serves one transfer only, so that the IV may
    be constant."""

    def __init__(self, token: bytes, nonce: bytes) -> None:
        key = _mac(token, b"seal", nonce)
        self._gcm = Cipher(algorithms.AES256(key), modes.GCM(bytes(_IV_BYTES))).encryptor()

    def add(self, data: memoryview) -> None:
        """Add the next bytes to the GMAC."""
        self._gcm.authenticate_additional_data(data)

    def digest(self) -> bytes:
        """Return the GMAC of all added bytes. ``add`` must not be called afterwards."""
        self._gcm.finalize()
        return self._gcm.tag


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _proof(token: bytes, nonce: bytes, name: str, generation: int) -> bytes:
    return _mac(token, b"ask", nonce, generation.to_bytes(8, "little"), name.encode())


def pull(
    address: str, name: str, generation: int, token: str, target: NDArray[np.uint8], *, timeout_s: float,
    tls: ssl.SSLContext | None = None, on_bytes: Callable[[int], None] = lambda num_bytes: None,
    exact: bool = True,
) -> int:  # fmt: skip
    """Fetch a blob into ``target``, uint8 [size of the blob], and return its size; blocks.

    Unless ``exact``, the blob may be smaller: it then fills the beginning of ``target``.

    A ``target`` whose memory was used before is filled several times faster than fresh memory. With ``tls`` the
    certificate of the producer must name the host in ``address``. ``on_bytes`` is called repeatedly, perhaps by another
    thread, with the number of bytes received so far. The seal verifies the bytes only when all have arrived.

    Raises:
        NotFound: the producer no longer has the blob.
        Unavailable: the producer cannot be reached or disconnected, rejects the token or this process, or cannot
            authenticate itself.
        DeadlineError: not complete after ``timeout_s``.
        ProtocolError: the producer has another size under this name, or the bytes were changed in transit.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    what = f"{target.nbytes} bytes of '{name}' from {address}"
    try:
        with _connected(host, int(port), timeout_s, tls) as peer:
            nonce, key = _greeting(peer, deadline)[len(MAGIC) :], bytes.fromhex(token)
            proof = _proof(key, nonce, name, generation)
            peer.sendall(_REQUEST.pack(MAGIC, len(name.encode()), generation, proof) + name.encode())
            reply = bytearray(_REPLY.size)
            _receive_into(peer, memoryview(reply), deadline)
            status, size = _REPLY.unpack(reply)
            if status == _REFUSED:
                raise Unavailable(f"{address} refuses the token for '{name}'")
            if status:
                raise NotFound(f"{address} does not have generation {generation} of '{name}' any more")
            if size > target.nbytes or (exact and size < target.nbytes):
                raise ProtocolError(f"{address} has {size} bytes under '{name}', not {target.nbytes}")
            seal = _Seal(key, nonce)
            _receive_blob(peer, target[:size], deadline, seal, on_bytes)
            expected = bytearray(_SEAL_BYTES)
            _receive_into(peer, memoryview(expected), deadline)
            if not hmac.compare_digest(seal.digest(), expected):
                raise ProtocolError(f"the {what} were changed on their way")
            peer.sendall(b"\1")
            return int(size)
    except TimeoutError:
        raise DeadlineError(f"waited {timeout_s:.1f} s for {what}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ProtocolError | Unavailable):
            raise
        raise Unavailable(f"cannot fetch {what}: {error}") from None


def _receive_blob(
    peer: socket.socket, target: NDArray[np.uint8], deadline: float, seal: _Seal, on_bytes: Callable[[int], None]
) -> None:
    """Receive a blob into ``target``, add its bytes to ``seal``, and report progress to ``on_bytes`` (see ``pull``)."""

    def check(start: int) -> None:
        piece = target[start : start + _PIECE].data
        seal.add(piece)
        on_bytes(start + len(piece))

    with _in_order(target.nbytes) as beside:
        for start in range(0, target.nbytes, _PIECE):
            _receive_into(peer, target[start : start + _PIECE].data, deadline)
            beside(check, start)


@contextlib.contextmanager
def _in_order(nbytes: int) -> Iterator[Callable[[Callable[[int], None], int], None]]:
    """Yield a function ``submit(call, start)``, which executes ``call(start)``: in a second thread for blobs above
    ``_BESIDE`` bytes, otherwise at once. ``start`` is an offset in the blob.

    The thread makes the calls in order. Unless the ``with`` block fails, its end waits for the last call. If a call in
    the thread fails, a later ``submit`` or the end of the block raises its error.
    """
    if nbytes <= _BESIDE:
        yield lambda call, start: call(start)
        return
    calls: deque[Future[None]] = deque()

    def submit(call: Callable[[int], None], start: int) -> None:
        calls.append(thread.submit(call, start))
        while calls[0].done() and len(calls) > 1:
            calls.popleft().result()

    with ThreadPoolExecutor(1, "bulk-seal") as thread:
        try:
            yield submit
            for unfinished in calls:
                unfinished.result()
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def _connected(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    """Return a socket connected to a producer, over TLS if ``tls`` is set. Raises OSError."""
    peer = socket.create_connection((host, port), timeout=timeout_s)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer if tls is None else tls.wrap_socket(peer, server_hostname=host)
    except BaseException:
        peer.close()
        raise


def _greeting(peer: socket.socket, deadline: float) -> bytes:
    """Receive and return the greeting of a producer: a magic number and a nonce. Raises OSError.

    A producer with TLS sends nothing to a client without TLS, and then disconnects: the error suggests this cause.
    """
    greeting = bytearray(len(MAGIC) + _NONCE_BYTES)
    try:
        _receive_into(peer, memoryview(greeting), deadline)
    except ConnectionResetError as error:
        if isinstance(peer, ssl.SSLSocket):
            raise
        raise ConnectionResetError(f"{error} at once: does it want TLS (PENSTOCK_BULK_TLS_CA)?") from None
    return bytes(greeting)


def _cut(peer: socket.socket) -> None:
    """Shut down the TCP connection of a socket that another thread may use.

    ``SSLSocket.shutdown`` is not called: it drops the encryption, and the other thread could then send in clear.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(peer, socket.SHUT_RDWR)


def _receive(peer: socket.socket, nbytes: int) -> bytes:
    """Receive exactly ``nbytes`` bytes, or fewer if the peer closed."""
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
