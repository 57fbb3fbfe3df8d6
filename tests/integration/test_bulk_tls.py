"""Bulk data and weights between hosts over TLS: accepted and refused peers, and no plain text on the wire."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.transport import bulk_server
from penstock.shared.transport.bulk import BulkReader, BulkStore
from penstock.shared.weights.flat import layout_of
from penstock.shared.weights.open import open_publisher, open_receiver

MIB = 1 << 20


Host = Callable[..., ServiceSettings]


@pytest.fixture
def host(tmp_path: Path, certificates: dict[str, Path]) -> Host:
    """``host(name, ca=..., cert=..., key=...)`` returns settings of a process on that host with these certificates."""

    def settings(name: str, **files: str) -> ServiceSettings:
        shm = tmp_path / name
        shm.mkdir()
        tls = {f"bulk_tls_{kind}": certificates[file] for kind, file in files.items()}
        return ServiceSettings(host_id=name, shm_dir=shm, data_dir=tmp_path, **tls)

    return settings


@pytest.fixture
def near(host: Host) -> ServiceSettings:
    """Settings of a server that demands a certificate of its clients."""
    settings = host("near", ca="ca.pem", cert="server.pem", key="server.key")
    return settings.model_copy(update={"bulk_host": "127.0.0.1"})


@pytest.fixture
def far(host: Host) -> ServiceSettings:
    return host("far", ca="ca.pem", cert="client.pem", key="client.key")


@pytest.fixture
def store(near: ServiceSettings) -> Iterator[BulkStore]:
    with BulkStore(near) as made:
        yield made


def test_an_eavesdropper_cannot_read_fetched_data(store: BulkStore, far: ServiceSettings) -> None:
    text = b"what nobody else is to read, again and again; "
    content = text * (MIB // len(text))
    claim = store.put([content], digest=True)
    where, _, port = claim.address.rpartition(":")
    overheard = bytearray()

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                overheard.extend(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def listen(between: socket.socket) -> None:
        peer, _ = between.accept()
        with peer, socket.create_connection((where, int(port)), timeout=30) as server:
            back = threading.Thread(target=forward, args=(server, peer))
            back.start()
            forward(peer, server)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as between:
        thread = threading.Thread(target=listen, args=(between,))
        thread.start()
        moved = msgspec.structs.replace(claim, address=f"127.0.0.1:{between.getsockname()[1]}")
        with BulkReader(far).fetch(moved, timeout_s=30) as blob:
            assert bytes(blob.data) == content
        thread.join()
    assert len(overheard) > len(content)
    assert text[:16] not in overheard
    assert claim.name.encode() not in overheard


REFUSED = "(?i)certificate|unknown ca|closed the connection|reset|broken pipe"
"""Errors of a refused client; the server may close the connection before its reason arrives."""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ca": "ca.pem"}, REFUSED),
        ({"ca": "ca.pem", "cert": "other.pem", "key": "other.key"}, REFUSED),
        ({"ca": "other.pem", "cert": "client.pem", "key": "client.key"}, "certificate verify failed"),
    ],
    ids=["no certificate", "of another authority", "trusts another authority"],
)
def test_without_certificates_of_the_authority_nothing_is_fetched(
    store: BulkStore, far: ServiceSettings, host: Host, files: dict[str, str], message: str
) -> None:
    claim = store.put([bytes(MIB)])
    with pytest.raises(Unavailable, match=message):
        BulkReader(host("stranger", **files)).fetch(claim, timeout_s=30)
    with BulkReader(far).fetch(claim, timeout_s=30) as blob:
        assert blob.data.nbytes == MIB


def test_a_client_without_tls_gets_the_name_of_the_missing_setting(
    store: BulkStore, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_server, "_PROOF_S", 0.2)
    with pytest.raises(Unavailable, match="PENSTOCK_BULK_TLS_CA"):
        BulkReader(host("stranger")).fetch(store.put([bytes(MIB)]), timeout_s=30)


def test_a_client_with_tls_refuses_an_unencrypted_server(near: ServiceSettings, far: ServiceSettings) -> None:
    clear = near.model_copy(update={"bulk_tls_ca": None, "bulk_tls_cert": None, "bulk_tls_key": None})
    with BulkStore(clear) as store, pytest.raises(Unavailable, match=r"(?i)ssl"):
        BulkReader(far).fetch(store.put([bytes(MIB)]), timeout_s=30)


def test_a_certificate_of_another_host_is_refused(near: ServiceSettings, far: ServiceSettings) -> None:
    elsewhere = near.model_copy(update={"bulk_host": "localhost"})
    with BulkStore(elsewhere) as store, pytest.raises(Unavailable, match="certificate is not valid for 'localhost'"):
        BulkReader(far).fetch(store.put([bytes(MIB)]), timeout_s=30)


def test_a_server_without_a_ca_demands_no_client_certificate(near: ServiceSettings, host: Host) -> None:
    open_to_all = near.model_copy(update={"bulk_tls_ca": None})
    reader = BulkReader(host("nameless", ca="ca.pem"))
    with BulkStore(open_to_all) as store, reader.fetch(store.put([b"1" * MIB]), timeout_s=30) as blob:
        assert set(blob.data[::4096]) == {ord("1")}


@pytest.mark.long
def test_strangers_without_a_handshake_do_not_block_other_clients(
    store: BulkStore, far: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_server, "_MAX_UNPROVEN", 8)
    claim = store.put([b"1" * MIB])
    where, _, port = claim.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((where, int(port)), timeout=30)) for _ in range(20)]
        with BulkReader(far).fetch(claim, timeout_s=30) as blob:
            assert set(blob.data[::4096]) == {ord("1")}
        for peer in idle:
            with contextlib.suppress(ConnectionError):
                assert not peer.recv(64)


def test_weights_come_over_tls(near: ServiceSettings, far: ServiceSettings, host: Host) -> None:
    weights = {"w": torch.arange(1 << 16, dtype=torch.float32)}
    publisher = open_publisher("job_a", layout_of(weights.items()), near)
    manifest = publisher.publish(weights.items(), version=1, epoch=1)
    staged = open_receiver(far).stage(manifest)
    assert torch.equal(staged.tensors()["w"], weights["w"])
    staged.release()
    stranger = host("stranger", ca="other.pem", cert="other.pem", key="other.key")
    with pytest.raises(WeightsError, match="certificate verify failed"):
        open_receiver(stranger).stage(manifest)
    publisher.close()


def test_settings_that_cannot_serve_over_tls_are_refused(near: ServiceSettings, host: Host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_BULK_TLS_CERT and PENSTOCK_BULK_TLS_KEY belong together"):
        BulkReader(host("half", cert="client.pem"))
    with pytest.raises(ConfigError, match="set PENSTOCK_BULK_TLS_CERT and PENSTOCK_BULK_TLS_KEY"):
        BulkStore(near.model_copy(update={"bulk_tls_cert": None, "bulk_tls_key": None}))
    with pytest.raises(ConfigError, match=r"PENSTOCK_BULK_TLS_\* cannot be used"):
        BulkReader(near.model_copy(update={"bulk_tls_ca": tmp_path / "gone.pem"}))
