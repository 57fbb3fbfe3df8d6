"""Bulk data by claim check, on one host and between hosts, with consumers and producers that stop and die."""

from __future__ import annotations

import contextlib
import hmac
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, DeadlineError, NotFound, ProtocolError, Unavailable
from penstock.shared.protocol.claim import Claim
from penstock.shared.protocol.frame import decode_frame, encode_frame
from penstock.shared.transport import bulk_server
from penstock.shared.transport.bulk import BulkReader, BulkStore
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile, Owner, sweep

MIB = 1 << 20

CONSUMER = """
import sys, msgspec
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.protocol.claim import Claim
from penstock.shared.transport.bulk import BulkReader
claim = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=Claim)
blob = BulkReader(ServiceSettings(host_id="near", shm_dir=Path(sys.argv[1]))).fetch(claim)
print("fetched", flush=True)
for line in sys.stdin:
    print(set(blob.data[::4096]), flush=True)
"""

PRODUCER = """
import sys, msgspec
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.transport.bulk import BulkStore
store = BulkStore(ServiceSettings(host_id="near", shm_dir=Path(sys.argv[1])))
print(msgspec.msgpack.encode(store.put([bytes([5]) * (1 << 20)])).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def near(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(host_id="near", shm_dir=tmp_path, bulk_host="127.0.0.1", bulk_bytes=3 * MIB)


@pytest.fixture
def far(tmp_path: Path) -> ServiceSettings:
    (tmp_path / "elsewhere").mkdir()
    return ServiceSettings(host_id="far", shm_dir=tmp_path / "elsewhere")


@pytest.fixture
def store(near: ServiceSettings) -> Iterator[BulkStore]:
    with BulkStore(near) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def reader(request: pytest.FixtureRequest, near: ServiceSettings, far: ServiceSettings) -> Iterator[BulkReader]:
    with BulkReader(near if request.param == "shm" else far) as made:
        yield made


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes = []

    def run(code: str, *args: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", code, *args]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def filled(value: int, nbytes: int = MIB) -> list[bytes]:
    return [bytes([value]) * nbytes]


def segments(settings: ServiceSettings) -> int:
    return len([path for path in settings.shm_dir.iterdir() if path.is_file() and path.suffix != ".owner"])


def test_frames_come_out_as_they_went_in(store: BulkStore, reader: BulkReader) -> None:
    tree = {
        "step": 3,
        "rgb": np.arange(300_000, dtype=np.uint8).reshape(100, 1000, 3),
        "state": np.ones((4, 7), np.float32),
    }
    claim = store.put(encode_frame(tree), digest=True)
    claim = msgspec.msgpack.decode(msgspec.msgpack.encode(claim), type=Claim)
    with reader.fetch(claim) as blob:
        out = decode_frame(blob.data)
        assert out["step"] == 3
        np.testing.assert_array_equal(out["rgb"], tree["rgb"])
        np.testing.assert_array_equal(out["state"], tree["state"])


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB + 12345])
def test_blobs_of_any_size_arrive_unchanged(store: BulkStore, reader: BulkReader, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    with reader.fetch(store.put([data[:7], b"", memoryview(data)[7:]], digest=True)) as blob:
        assert blob.data == data


def test_a_released_segment_is_used_again(store: BulkStore, near: ServiceSettings) -> None:
    with BulkReader(near) as reader:
        for value in range(5):
            claim = store.put(filled(value))
            with reader.fetch(claim) as blob:
                assert set(blob.data[::4096]) == {value}
            store.release(claim)
            assert segments(near) == 1


def test_segments_are_reused_after_release(store: BulkStore, reader: BulkReader, near: ServiceSettings) -> None:
    for value in range(20):
        claim = store.put(filled(value))
        with reader.fetch(claim) as blob:
            assert set(blob.data[::4096]) == {value}
        store.release(claim)
        store.release(claim)
    # A TCP peer's receipt may arrive after the next put, which then takes another segment of the small pool.
    assert segments(near) <= near.bulk_bytes // MIB


def test_reader_keeps_its_bytes_after_the_producer_released_them(store: BulkStore, near: ServiceSettings) -> None:
    reader = BulkReader(near)
    claim = store.put(filled(1))
    blob = reader.fetch(claim)
    store.release(claim)
    for value in (2, 3, 4):
        store.release(store.put(filled(value)))
    assert set(blob.data[::4096]) == {1}
    with pytest.raises(NotFound):
        reader.fetch(claim)


def test_blob_that_is_dropped_without_release_keeps_its_bytes(store: BulkStore, near: ServiceSettings) -> None:
    reader = BulkReader(near)
    claim = store.put(filled(1))
    data = reader.fetch(claim).data
    store.release(claim)
    for value in (2, 3, 4):
        store.release(store.put(filled(value)))
    assert set(data[::4096]) == {1}


def test_shared_bytes_cannot_be_written_by_a_reader(store: BulkStore, near: ServiceSettings) -> None:
    with BulkReader(near).fetch(store.put(encode_frame(np.zeros(9)))) as blob:
        assert blob.data.readonly
        assert not decode_frame(blob.data).flags.writeable


def test_released_claims_are_not_found(store: BulkStore, reader: BulkReader) -> None:
    claim = store.put(filled(1))
    store.release(claim)
    with pytest.raises(NotFound):
        reader.fetch(claim)
    store.put(filled(2))
    with pytest.raises(NotFound):
        reader.fetch(claim)


def test_full_pool_waits_and_names_the_holders(store: BulkStore, near: ServiceSettings) -> None:
    reader = BulkReader(near)
    claims = [store.put(filled(value)) for value in range(3)]
    blob = reader.fetch(claims[0])
    store.release(claims[0])
    with pytest.raises(DeadlineError, match=rf"2 of 3 segments are not released, processes \[{os.getpid()}\]"):
        store.put(filled(9), timeout_s=0.05)
    timer = threading.Timer(0.1, blob.release)
    timer.start()
    store.put(filled(9), timeout_s=5)
    timer.join()
    with pytest.raises(NotFound):
        BulkReader(near).fetch(claims[0])
    assert segments(near) == 3, "the segment was written again, or another took its place"


def test_small_segments_make_room_for_a_large_one(store: BulkStore, reader: BulkReader, near: ServiceSettings) -> None:
    for claim in [store.put(filled(value)) for value in range(3)]:
        store.release(claim)
    with reader.fetch(store.put(filled(7, 3 * MIB - 5))) as blob:
        assert len(blob.data) == 3 * MIB - 5
    assert segments(near) == 1


def test_more_than_the_pool_is_a_configuration_error(store: BulkStore) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_BULK_BYTES"):
        store.put(filled(1, 4 * MIB))


def test_single_use_bytes_are_free_once_their_consumer_is_done(store: BulkStore, reader: BulkReader) -> None:
    for value in range(12):
        with reader.fetch(store.put(filled(value), single_use=True, timeout_s=2)) as blob:
            assert set(blob.data[::4096]) == {value}


def test_single_use_bytes_wait_for_their_consumer(store: BulkStore, near: ServiceSettings) -> None:
    claims = [store.put(filled(value), single_use=True) for value in range(3)]
    with pytest.raises(DeadlineError):
        store.put(filled(9), timeout_s=0.05)
    with BulkReader(near).fetch(claims[1]) as blob:
        with pytest.raises(DeadlineError):
            store.put(filled(9), timeout_s=0.05)
        assert set(blob.data[::4096]) == {1}
    assert store.put(filled(9), timeout_s=0.05).name == claims[1].name


def test_stopped_consumer_keeps_its_bytes_and_a_killed_one_frees_them(
    store: BulkStore, near: ServiceSettings, start: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    claim = store.put(filled(5), single_use=True)
    consumer, output = start(CONSUMER, str(near.shm_dir), msgspec.msgpack.encode(claim).hex())
    assert output == "fetched"
    os.kill(consumer.pid, signal.SIGSTOP)
    others = [store.put(filled(value)) for value in (1, 2)]
    with pytest.raises(DeadlineError, match=str(consumer.pid)):
        store.put(filled(9), timeout_s=0.05)
    os.kill(consumer.pid, signal.SIGCONT)
    assert consumer.stdin is not None
    assert consumer.stdout is not None
    consumer.stdin.write("look\n")
    consumer.stdin.flush()
    assert consumer.stdout.readline() == "{5}\n"
    consumer.kill()
    consumer.wait()
    assert store.put(filled(9), timeout_s=0).name == claim.name
    assert claim.name not in {other.name for other in others}


def test_segments_of_a_killed_producer_are_swept(
    near: ServiceSettings, start: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    producer, output = start(PRODUCER, str(near.shm_dir))
    claim = msgspec.msgpack.decode(bytes.fromhex(output), type=Claim)
    blob = BulkReader(near).fetch(claim)
    with BulkStore(near):
        assert (near.shm_dir / claim.name).exists()  # its producer is alive
    producer.kill()
    producer.wait()
    with BulkStore(near):
        assert not (near.shm_dir / claim.name).exists()
    assert set(blob.data[::4096]) == {5}
    with pytest.raises(NotFound):
        BulkReader(near).fetch(claim)


def test_sweeping_leaves_living_owners_alone(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "penstock-bulk-")
    owner.next_path().touch()
    assert sweep(tmp_path, "penstock-bulk-") == []
    assert len(list(tmp_path.iterdir())) == 2
    owner.close()
    assert list(tmp_path.iterdir()) == []


def test_digest_mismatch_is_refused(store: BulkStore, reader: BulkReader, near: ServiceSettings) -> None:
    claim = store.put(filled(1), digest=True)
    with (near.shm_dir / claim.name).open("r+b") as file:
        file.seek(DATA_OFFSET + 777)
        file.write(b"\xff")
    with pytest.raises(ProtocolError, match="digest"):
        reader.fetch(claim)
    store.release(claim)
    file_lock = LockedFile.open(near.shm_dir / claim.name)
    deadline = time.monotonic() + 5  # over TCP the producer releases the blob when it sees the closed connection
    while not file_lock.try_exclusive():  # the refused blob holds no lock
        assert time.monotonic() < deadline
        time.sleep(0.01)
    file_lock.close()


def test_claims_with_false_fields_are_refused(store: BulkStore, reader: BulkReader) -> None:
    claim = store.put(filled(1))
    for changes, error in (
        ({"nbytes": MIB + 1}, ProtocolError),
        ({"generation": 77}, (NotFound, Unavailable)),
        ({"name": claim.name + "0"}, (NotFound, Unavailable)),
        ({"name": "../" + claim.name}, (ProtocolError, NotFound, Unavailable)),
        ({"name": "x" * 300}, (ProtocolError, NotFound, Unavailable)),
    ):
        with pytest.raises(error):
            reader.fetch(msgspec.structs.replace(claim, **changes))


def test_closed_store_leaves_nothing(near: ServiceSettings, reader: BulkReader) -> None:
    store = BulkStore(near)
    claim = store.put(filled(1))
    store.close()
    assert segments(near) == 0
    with pytest.raises((NotFound, Unavailable)):
        reader.fetch(claim)


def test_other_hosts_need_an_address(near: ServiceSettings, far: ServiceSettings) -> None:
    with BulkStore(near.model_copy(update={"bulk_host": ""})) as store, pytest.raises(Unavailable, match="BULK_HOST"):
        BulkReader(far).fetch(store.put(filled(1)))


def test_silent_producer_ends_in_a_deadline(far: ServiceSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        claim = Claim("near", "penstock-bulk-x-1", 1, MIB, "", address)
        with pytest.raises(DeadlineError, match=r"waited 0\.2 s for 1048576 bytes"):
            BulkReader(far).fetch(claim, timeout_s=0.2)


def test_server_survives_strangers(store: BulkStore, far: ServiceSettings) -> None:
    claim = store.put(filled(1))
    host, _, port = claim.address.rpartition(":")
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PSB3", b"PSB3" + b"\xff" * 42 + b"\xff" * 70000):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(junk)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):  # the server closes the connection
                pass
    with BulkReader(far).fetch(claim) as blob:
        assert set(blob.data[::4096]) == {1}


def request_for(claim: Claim, nonce: bytes, token: str | None = None) -> bytes:
    name, generation = claim.name.encode(), claim.generation.to_bytes(8, "little")
    key = bytes.fromhex(claim.token if token is None else token)
    proof = hmac.digest(key, b"ask" + nonce + generation + name, "sha256")
    return b"PSB3" + len(name).to_bytes(2, "little") + generation + proof + name


def test_only_holders_of_the_claim_are_served(store: BulkStore, far: ServiceSettings) -> None:
    claim, other = store.put(filled(1)), store.put(filled(2))
    assert claim.token != other.token
    for token in ("", "00" * 32, other.token):
        with pytest.raises(Unavailable, match="refuses the token"):
            BulkReader(far).fetch(msgspec.structs.replace(claim, token=token))
    host, _, port = claim.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as first:
        overheard = request_for(claim, first.recv(20, socket.MSG_WAITALL)[4:])
    with socket.create_connection((host, int(port)), timeout=5) as peer:  # an overheard request is of no use
        peer.recv(20, socket.MSG_WAITALL)
        peer.sendall(overheard)
        assert peer.recv(9, socket.MSG_WAITALL)[0] == 2
    with BulkReader(far).fetch(claim) as blob:
        assert set(blob.data[::4096]) == {1}


@pytest.mark.parametrize("beside", [64 * MIB, 0], ids=["one thread", "a thread beside"])
def test_bytes_that_were_changed_on_their_way_are_refused(
    store: BulkStore, far: ServiceSettings, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver also detects changed bytes if the sender computed no digest."""
    monkeypatch.setattr(bulk_server, "_BESIDE", beside)
    claim = store.put(filled(1), digest=False)
    host, _, port = claim.address.rpartition(":")

    def forward(between: socket.socket) -> None:
        peer, _ = between.accept()
        with peer, socket.create_connection((host, int(port)), timeout=5) as server:
            peer.sendall(server.recv(20, socket.MSG_WAITALL))
            server.sendall(peer.recv(46 + len(claim.name), socket.MSG_WAITALL))
            server.settimeout(None)
            data = bytearray(server.recv(9 + claim.nbytes + 16, socket.MSG_WAITALL))
            data[9 + claim.nbytes // 2] ^= 1
            peer.sendall(data)
            peer.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as between:
        thread = threading.Thread(target=forward, args=(between,))
        thread.start()
        address = f"127.0.0.1:{between.getsockname()[1]}"
        with pytest.raises(ProtocolError, match="changed on their way"):
            BulkReader(far).fetch(msgspec.structs.replace(claim, address=address))
        thread.join()


def test_large_blobs_are_sealed_while_they_are_sent_and_received(
    store: BulkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_server, "_BESIDE", 2 * MIB)
    monkeypatch.setattr(bulk_server, "_CHUNK", MIB)
    for nbytes, beside in ((2 * MIB, False), (2 * MIB + 5, True)):
        received: list[tuple[int, bool]] = []
        data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        target = np.zeros(nbytes, np.uint8)
        claim = store.put([data.tobytes()])

        def on_bytes_received(count: int, received: list[tuple[int, bool]] = received) -> None:
            received.append((count, threading.current_thread() is not threading.main_thread()))

        bulk_server.pull(
            claim.address, claim.name, claim.generation, claim.token, target, timeout_s=60, on_bytes=on_bytes_received
        )  # fmt: skip
        store.release(claim)
        assert np.array_equal(target, data)
        assert received == [(count, beside) for count in (MIB, 2 * MIB, nbytes)[: 2 + beside]]


@pytest.mark.long
def test_silent_strangers_do_not_block_other_clients(
    near: ServiceSettings, far: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_server, "_PROOF_S", 0.5)
    with BulkStore(near) as store, contextlib.ExitStack() as stack:
        claim = store.put(filled(1))
        host, _, port = claim.address.rpartition(":")
        idle = [stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(150)]
        with BulkReader(far).fetch(claim, timeout_s=10) as blob:
            assert set(blob.data[::4096]) == {1}
        for peer in idle:  # all are dropped, not only those above the limit
            with contextlib.suppress(ConnectionError):
                while peer.recv(64):
                    pass


def test_slow_peer_never_sees_rewritten_bytes(near: ServiceSettings) -> None:
    """The kernel sends pages of the segment itself, which may not be rewritten before the peer has all bytes."""
    settings = near.model_copy(update={"bulk_bytes": 64 * MIB})
    with BulkStore(settings) as store:
        claim = store.put(filled(1, 16 * MIB))
        host, _, port = claim.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            nonce = peer.recv(20, socket.MSG_WAITALL)[4:]
            peer.sendall(request_for(claim, nonce))
            peer.settimeout(None)  # MSG_WAITALL does not wait on a socket with a timeout
            head = peer.recv(9, socket.MSG_WAITALL)
            assert head == b"\0" + (16 * MIB).to_bytes(8, "little")
            store.release(claim)
            almost = 16 * MIB - 50_000
            assert set(peer.recv(almost, socket.MSG_WAITALL)[::4096]) == {1}
            time.sleep(0.2)  # by now all the rest is in socket buffers, as references to the pages
            assert store.put(filled(2, 16 * MIB)).name != claim.name
            assert set(peer.recv(50_000, socket.MSG_WAITALL)) == {1}
            peer.sendall(b"\1")
        file = LockedFile.open(near.shm_dir / claim.name)
        deadline = time.monotonic() + 5
        while not file.try_exclusive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        file.close()


def test_many_threads_share_a_store_and_a_reader(store: BulkStore, reader: BulkReader) -> None:
    failures = []

    def work(seed: int) -> None:
        for turn in range(25):
            value = (seed * 25 + turn) % 256
            claim = store.put(filled(value, 900_000), timeout_s=20)
            with reader.fetch(claim) as blob:
                if set(blob.data[::4096]) != {value}:
                    failures.append((seed, turn))
            store.release(claim)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
