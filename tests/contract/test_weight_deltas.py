"""Weights for another host as changes: a receiver in another process gets the publisher's bits, or all bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import NotFound
from penstock.shared.protocol.weights import ALIGN, WeightManifest
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile
from penstock.shared.transport.bulk_server import pull
from penstock.shared.weights import cleanup, layout_of, open_publisher, shm
from penstock.shared.weights.delta import encode
from penstock.shared.weights.slots import slot_paths

JOB, FAR = "job_d", "far"
BUCKET = 1 << 18
RECEIVER = """
import json, sys, msgspec, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.weights import digest_of_tensors, open_receiver, tcp
torch.set_num_threads(1)
tcp.BUCKET_BYTES = int(sys.argv[1])
receivers, serving = {}, {}
print("ready", flush=True)
for line in sys.stdin:
    directory, data = json.loads(line)
    if directory not in receivers:
        receivers[directory] = open_receiver(ServiceSettings(host_id="far", shm_dir=Path(directory)))
    before, answer = serving.get(directory), {}
    manifest = msgspec.msgpack.decode(bytes.fromhex(data), type=WeightManifest)
    try:
        serving[directory] = receivers[directory].stage(manifest)
        answer["fetched"] = serving[directory].way.fetched_bytes
        if before is not None:
            before.release()
    except WeightsError as error:
        answer["error"] = str(error)
    if directory in serving:
        answer["digest"] = digest_of_tensors(serving[directory].tensors().items())
    print(json.dumps(answer), flush=True)
"""
"""Stages each version in a directory, one for each host that it plays, and answers with the digest that it serves."""


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Return four buckets of tensors; the last bucket is not full."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "narrow": torch.randn(400_000, generator=generator).to(torch.bfloat16),
        "half": torch.randn(1001, generator=generator).half(),
        "wide": torch.randn(50_000, generator=generator),
    }


def changed(tensors: dict[str, Tensor], seed: int, *, name: str = "narrow", share: float = 0.02) -> dict[str, Tensor]:
    """Return a copy in which a share of the elements of a tensor have other bits, NaNs and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    tensor = tensors[name].clone()
    bits = tensor.view(torch.int16)
    places = torch.randperm(len(bits), generator=generator)[: int(share * len(bits))]
    bits[places] = torch.randint(-(2**15), 2**15, (len(places),), generator=generator, dtype=torch.int16)
    special = torch.tensor([0x7FC1, -1, 0, -(2**15)], dtype=torch.int16)[: len(places)]
    bits[places[: len(special)]] = special
    return {**tensors, name: tensor}


LAYOUT = layout_of(weights().items())


class Plane:
    """A publisher in this process, and a receiver in another one that plays several hosts."""

    def __init__(self, receiver: subprocess.Popen[str], directory: Path, *, deltas: bool = True) -> None:
        self.receiver, self.directory = receiver, directory
        self.settings = ServiceSettings(
            host_id="near", shm_dir=directory / "near", bulk_host="127.0.0.1", weight_deltas=deltas
        )
        self.settings.shm_dir.mkdir()
        self.publisher = open_publisher(JOB, LAYOUT, self.settings)

    def publish(self, tensors: dict[str, Tensor], version: int, epoch: int = 1) -> WeightManifest:
        return self.publisher.publish(tensors.items(), version=version, epoch=epoch)

    def stage(self, manifest: WeightManifest, host: str = FAR) -> dict[str, Any]:
        """Let a host stage a version; return its answer once the publisher has unlocked the slots that it served."""
        self.folder(host).mkdir(exist_ok=True)
        assert self.receiver.stdin is not None
        assert self.receiver.stdout is not None
        self.receiver.stdin.write(json.dumps([str(self.folder(host)), msgspec.msgpack.encode(manifest).hex()]) + "\n")
        self.receiver.stdin.flush()
        answer: dict[str, Any] = json.loads(self.receiver.stdout.readline())
        deadline = time.monotonic() + 60
        while any(is_locked(path) for path in slot_paths(self.settings.shm_dir, JOB)):
            assert time.monotonic() < deadline, "a slot stays locked"
            time.sleep(0.005)
        return answer

    def folder(self, host: str = FAR) -> Path:
        return self.directory / host

    def restart(self, *, elsewhere: bool = False) -> None:
        """Let another publisher take over: with the slots that it finds, or as ``elsewhere`` with none."""
        self.publisher.close()
        if elsewhere:
            cleanup(JOB, self.settings)
        self.publisher = open_publisher(JOB, LAYOUT, self.settings)


@pytest.fixture(scope="module")
def receiver() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RECEIVER, str(BUCKET)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def plane(receiver: subprocess.Popen[str], tmp_path: Path) -> Iterator[Plane]:
    made = Plane(receiver, tmp_path)
    yield made
    made.publisher.close()


def is_locked(path: Path) -> bool:
    file = LockedFile.open(path)
    locked = not file.try_exclusive()
    file.close()
    return locked


def flip_a_bit(path: Path) -> None:
    """Change a weight that no test changes: the first one of `wide`, in a slot."""
    with path.open("r+b") as file:
        at = file.seek(DATA_OFFSET + next(spec.offset for spec in LAYOUT.tensors if spec.name == "wide"))
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def handle_of(manifest: WeightManifest) -> list[str]:
    return next(ref for ref in manifest.refs if ref.transport == "tcp").handle.split("/")


def test_only_the_changes_cross_the_network_and_every_bit_arrives(plane: Plane) -> None:
    tensors, fetched = weights(), []
    for version in range(1, 6):
        manifest = plane.publish(tensors, version)
        answer = plane.stage(manifest)
        assert answer["digest"] == manifest.digest
        fetched.append(answer["fetched"])
        tensors = changed(tensors, version)
    assert fetched[0] == LAYOUT.nbytes
    assert all(20_000 < nbytes < LAYOUT.nbytes / 20 for nbytes in fetched[1:]), fetched


def test_buckets_in_which_much_changed_come_whole(plane: Plane) -> None:
    tensors = weights()
    plane.stage(plane.publish(tensors, 1))
    tensors = {**changed(tensors, 1), "wide": tensors["wide"] + 1}
    answer = plane.stage(manifest := plane.publish(tensors, 2))
    assert answer["digest"] == manifest.digest
    whole = LAYOUT.nbytes - 3 * BUCKET
    assert whole < answer["fetched"] < whole + 0.1 * 3 * BUCKET, "the first three buckets came as changes"
    answer = plane.stage(manifest := plane.publish(weights(9), 3))
    assert (answer["fetched"], answer["digest"]) == (LAYOUT.nbytes, manifest.digest)


def test_weights_that_did_not_change_cost_nothing(plane: Plane) -> None:
    plane.stage(plane.publish(weights(), 1))
    answer = plane.stage(manifest := plane.publish(weights(), 2))
    assert (answer["fetched"], answer["digest"]) == (4 * 4, manifest.digest)


def test_a_host_that_joins_late_or_missed_a_version_gets_all_bytes(plane: Plane) -> None:
    tensors = weights()
    plane.stage(plane.publish(tensors, 1), "early")
    tensors = changed(tensors, 1)
    second = plane.publish(tensors, 2)
    late = plane.stage(second, "late")
    assert (late["fetched"], late["digest"]) == (LAYOUT.nbytes, second.digest)
    third = plane.publish(changed(tensors, 2), 3)
    early, late = plane.stage(third, "early"), plane.stage(third, "late")
    assert (early["fetched"], early["digest"]) == (LAYOUT.nbytes, third.digest), "it has not seen version 2"
    assert (late["fetched"] < LAYOUT.nbytes / 20, late["digest"]) == (True, third.digest)


def test_a_base_that_the_publisher_overwrites_meanwhile_costs_all_bytes(plane: Plane) -> None:
    tensors = weights()
    plane.stage(plane.publish(tensors, 1))
    second = plane.publish(changed(tensors, 1), 2)
    plane.publish(changed(tensors, 2), 3)
    answer = plane.stage(second)
    assert (answer["fetched"], answer["digest"]) == (LAYOUT.nbytes, second.digest)


def test_a_base_with_other_bytes_than_its_digest_costs_all_bytes(plane: Plane) -> None:
    tensors = weights()
    plane.stage(plane.publish(tensors, 1))
    [copy] = slot_paths(plane.folder(), JOB, FAR)
    flip_a_bit(copy)
    answer = plane.stage(manifest := plane.publish(changed(tensors, 1), 2))
    assert answer["digest"] == manifest.digest
    assert LAYOUT.nbytes < answer["fetched"] < 1.05 * LAYOUT.nbytes, "the changes, and then all bytes"


def test_a_damaged_version_is_refused_and_the_next_one_works(plane: Plane) -> None:
    tensors = weights()
    first, tensors = plane.publish(tensors, 1), changed(tensors, 1)
    plane.stage(first)
    second = plane.publish(tensors, 2)
    flip_a_bit(plane.settings.shm_dir / handle_of(second)[1])
    answer = plane.stage(second)
    assert f"do not match digest {second.digest}" in answer["error"]
    assert answer["digest"] == first.digest, "the engine keeps its version"
    third = plane.publish(changed(tensors, 2), 3)
    answer = plane.stage(third)
    assert (answer["fetched"], answer["digest"]) == (LAYOUT.nbytes, third.digest)


@pytest.mark.parametrize("damage", ["other value", "cut off"])
def test_a_damaged_delta_costs_all_bytes(plane: Plane, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(previous: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        delta = encode(previous, new)
        assert delta is not None
        if len(delta) > 4:
            delta[4] ^= 1
        return delta if damage == "other value" else delta[:-1]

    tensors = weights()
    plane.stage(plane.publish(tensors, 1))
    monkeypatch.setattr(shm, "encode", damaged)
    answer = plane.stage(manifest := plane.publish(changed(tensors, 1), 2))
    assert answer["digest"] == manifest.digest
    assert LAYOUT.nbytes <= answer["fetched"] < 1.05 * LAYOUT.nbytes


def test_a_restarted_publisher_goes_on_with_its_slots_or_sends_all_bytes(plane: Plane) -> None:
    tensors = weights()
    plane.stage(plane.publish(tensors, 1))
    plane.restart()
    tensors = changed(tensors, 1)
    answer = plane.stage(manifest := plane.publish(tensors, 2, epoch=2))
    assert (answer["fetched"] < LAYOUT.nbytes / 20, answer["digest"]) == (True, manifest.digest)
    plane.restart(elsewhere=True)
    answer = plane.stage(manifest := plane.publish(changed(tensors, 2), 3, epoch=3))
    assert (answer["fetched"], answer["digest"]) == (LAYOUT.nbytes, manifest.digest)


def test_without_the_setting_all_bytes_are_sent(receiver: subprocess.Popen[str], tmp_path: Path) -> None:
    plane = Plane(receiver, tmp_path, deltas=False)
    for version in (1, 2):
        manifest = plane.publish(changed(weights(), version), version)
        assert len(handle_of(manifest)) == 4
        assert plane.stage(manifest)["fetched"] == LAYOUT.nbytes
    plane.publisher.close()


def test_requests_for_no_bucket_find_nothing(plane: Plane) -> None:
    tensors = weights()
    plane.publish(tensors, 1)
    address, name, sequence, token, *bases = handle_of(plane.publish(changed(tensors, 1), 2))
    assert len(bases) == 2, "both slots have a version"
    target = np.zeros(LAYOUT.nbytes, np.uint8)

    def ask(request: str) -> int:
        return pull(address, f"{name}?{request}", int(sequence), token, target, timeout_s=30, exact=False)

    beyond = f"0/{LAYOUT.nbytes + ALIGN}"
    for numbers in ("0", beyond, "0/1", "1/64", "64/64", "128/64", "-64/64", "0/x", "0/64/64", f"0/{'9' * 5000}"):
        with pytest.raises(NotFound):
            ask(f"{bases[0]}/{numbers}")
    for unknown in ("", "0" * 32):
        with pytest.raises(NotFound):
            ask(f"{unknown}/0/64")
    assert ask(f"{bases[0]}/0/64") > 0
