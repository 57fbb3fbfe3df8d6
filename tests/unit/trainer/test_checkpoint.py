"""A checkpoint is complete or does not exist, and a run continues from it bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.trainer.backends.base import BackendState, LearnerState
from penstock.services.trainer.checkpoint import replay_shards
from penstock.services.trainer.checkpoint import store as module
from penstock.services.trainer.checkpoint.state import (
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    retain,
    save_checkpoint,
)
from penstock.services.trainer.environment import environment_differences
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]


def small_state(value: float = 1.0) -> LearnerState:
    tensor = torch.full((4,), value)
    policy = BackendState(
        weights={"w": tensor}, optimizer={"exp_avg.w": tensor.clone()}, reference={},
        rng={"cpu": torch.get_rng_state()}, files={"config.json": b"{}"}, environment={"threads": "1"},
    )  # fmt: skip
    return LearnerState(models={"policy": policy}, rule={})


class Crash(BaseException):
    """Stand-in for the end of the process, after which no handler cleans up."""


def numbers(root: Path) -> list[int]:
    return [c.manifest.number for c in list_checkpoints(root, "job_1")]


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"epochs": 2, "minibatches": 2}, "algorithm": {"kl": {"coef": 0.1}}},
        {"model": {"dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-3}},
    ],
    ids=["float32", "bfloat16"],
)
def test_save_load_continue_equals_uninterrupted(
    tmp_path: Path, make_config: Config, make_group: Callable[..., Group], sections: dict[str, Any]
) -> None:
    batches = [[make_group(4 * step + i, seed=step) for i in range(4)] for step in range(6)]
    config = make_config(**sections)
    learner = Learner(config)
    for step in range(3):
        learner.update(BatchShard.whole(batches[step]), update_index=step)
    path = save_checkpoint(tmp_path, "job_1", 3, learner.state(), {"version": 3})
    expected = [learner.update(BatchShard.whole(batches[step]), update_index=step) for step in range(3, 6)]

    resumed = Learner(config)
    loaded = load_checkpoint(path)
    torch.rand(5)  # the generator of this process is in another state
    resumed.load_state(loaded.state)
    assert torch.equal(torch.get_rng_state(), loaded.state.models["policy"].rng["cpu"])
    metrics = [resumed.update(BatchShard.whole(batches[step]), update_index=step) for step in range(loaded.number, 6)]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(learner.weights(), resumed.weights(), strict=True))
    for before, after in zip(expected, metrics, strict=True):
        assert {k: v for k, v in before.items() if not k.startswith(("update_s/", "speed/"))} == {
            k: v for k, v in after.items() if not k.startswith(("update_s/", "speed/"))
        }


def test_a_checkpoint_is_a_model_directory(tmp_path: Path, make_config: Config) -> None:
    learner = Learner(make_config())
    path = save_checkpoint(tmp_path, "job_1", 0, learner.state(), {})
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("12+7=", return_tensors="pt")["input_ids"]
    assert ids.tolist() == learner.tokenizer("12+7=", return_tensors="pt")["input_ids"].tolist()
    assert tokenizer.chat_template == learner.tokenizer.chat_template is not None
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, learner.model(input_ids=ids).logits)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_the_manifest_holds_metadata_and_the_environment(tmp_path: Path, make_config: Config) -> None:
    learner = Learner(make_config())
    path = save_checkpoint(tmp_path, "job_1", 7, learner.state(), {"version": 9, "epoch": 2})
    loaded = load_checkpoint(path)
    assert (loaded.number, loaded.meta) == (7, {"version": 9, "epoch": 2})
    pins = loaded.stored.manifest.environment
    assert pins["torch"] == torch.__version__
    assert pins["threads"] == "1"
    assert environment_differences(pins, learner.environment()) == []
    assert environment_differences(pins, {**pins, "threads": "2"}) == ["threads: checkpoint '1', here '2'"]
    assert environment_differences(pins, {**pins, "cpu": "another"}) == [
        f"cpu: checkpoint '{pins['cpu']}', here 'another'"
    ]
    assert pins["cpu"], "libraries choose kernels by it"


def test_the_same_state_is_written_once(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, "job_1", 1, small_state(), {})
    assert save_checkpoint(tmp_path, "job_1", 1, small_state(), {}) == first
    assert save_checkpoint(tmp_path, "job_1", 1, small_state(2.0), {}) != first
    assert numbers(tmp_path) == [1, 1]


def crash_points() -> list[str]:
    return ["fsync 1", "fsync 3", "rename 1", "rename 2"]


@pytest.mark.parametrize("point", crash_points())
def test_a_crash_leaves_no_partial_checkpoint_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Each operation on the disk fails once; the files left behind are those that a crash would leave."""
    fail_at(tmp_path, monkeypatch, point, Crash())
    assert numbers(tmp_path) == [1]
    assert len(list((tmp_path / "job_1").iterdir())) == 2, "something was left behind"
    (tmp_path / "job_1" / "20261121-mine").mkdir()
    module.remove_leftovers(tmp_path, "job_1")
    assert sorted(path.name[:9] for path in (tmp_path / "job_1").iterdir()) == ["00000001-", "20261121-"]
    fail_at(tmp_path, monkeypatch, point, Crash())
    save_checkpoint(tmp_path, "job_1", 2, small_state(2.0), {})
    assert numbers(tmp_path) == [1, 2]
    retain(tmp_path, "job_1", recorded=2, keep=5)
    assert len(list((tmp_path / "job_1").iterdir())) == 3, "two checkpoints, and the directory of another owner"


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files and their directory are synced before the rename to the final name; the marker follows, also synced."""
    done: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        sync(descriptor)
        done.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path / "job_1"))))

    def renamed(path: Path, target: Path) -> Path:
        done.append(("rename", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    path = save_checkpoint(tmp_path, "job_1", 1, small_state(), {})
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {"COMMIT"}
    named = done.index(("rename", path.name))
    before = {place.partition("/")[2] for what, place in done[:named] if what == "sync"}
    assert files <= before, "no file has its name before its bytes are on disk"
    assert "" in before, "nor before its directory knows the files"
    marker = f"{path.name}/COMMIT.partial"
    assert done[named + 1 :] == [("sync", "."), ("sync", marker), ("rename", "COMMIT"), ("sync", path.name)]


def test_a_checkpoint_that_could_not_be_written_takes_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(tmp_path, monkeypatch, "fsync 3", OSError(28, "No space left on device"))
    assert [path.name[:9] for path in (tmp_path / "job_1").iterdir()] == ["00000001-"]


def fail_at(root: Path, monkeypatch: pytest.MonkeyPatch, point: str, error: BaseException) -> None:
    """Save checkpoint 1, then try to save checkpoint 2, which fails at ``point``."""
    save_checkpoint(root, "job_1", 1, small_state(), {})
    name, _, count = point.partition(" ")
    owner: Any = os if name == "fsync" else Path
    original, calls = getattr(owner, name), iter(range(1, 100))

    def failing(*args: Any) -> Any:
        if next(calls) == int(count):
            raise error
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises((CheckpointError, Crash)):
            save_checkpoint(root, "job_1", 2, small_state(2.0), {})


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_found(tmp_path: Path, name: str, damage: str) -> None:
    path = save_checkpoint(tmp_path, "job_1", 1, small_state(), {})
    data = (path / name).read_bytes()
    if damage == "gone":
        (path / name).unlink()
    else:
        (path / name).write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_checkpoint(path)


def test_a_directory_without_marker_or_with_another_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "job_1", 1, small_state(), {"version": 1})
    manifest = (path / module.MANIFEST).read_text()
    (path / module.MANIFEST).write_text(manifest.replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="does not match its COMMIT"):
        read_manifest(path)
    assert numbers(tmp_path) == []
    (path / module.COMMIT).unlink()
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "job_1", 1, small_state(), {})
    manifest = (path / module.MANIFEST).read_text()
    later = manifest.replace(f'"schema": {module.SCHEMA}', f'"schema": {module.SCHEMA + 1}')
    (path / module.MANIFEST).write_text(later)
    (path / module.COMMIT).write_text(hashlib.sha256(later.encode()).hexdigest())
    with pytest.raises(CheckpointError, match=f"has schema {module.SCHEMA + 1}; this build reads {module.SCHEMA}"):
        read_manifest(path)


def test_retention_keeps_the_newest_and_the_pinned(tmp_path: Path) -> None:
    paths = [save_checkpoint(tmp_path, "job_1", n, small_state(n), {}) for n in range(6)]
    deleted = retain(tmp_path, "job_1", recorded=5, keep=2, pinned={0, 3})
    assert numbers(tmp_path) == [0, 3, 4, 5]
    assert deleted == [paths[1], paths[2]]
    assert not paths[1].exists()


def test_retention_keeps_what_the_ledger_names(tmp_path: Path) -> None:
    """A trainer may end between the commit of a checkpoint and its report."""
    initial, recorded, again, orphan = (
        save_checkpoint(tmp_path, "job_1", number, small_state(), {"epoch": epoch})
        for number, epoch in ((0, 1), (7, 1), (7, 2), (8, 1))
    )
    assert retain(tmp_path, "job_1", recorded=7, keep=1) == [initial]
    assert all(path.exists() for path in (recorded, again, orphan)), "the ledger names one of number 7"
    assert set(retain(tmp_path, "job_1", recorded=8, keep=1)) == {recorded, again}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, make_config: Config) -> None:
    learner = Learner(make_config())
    with pytest.raises(CheckpointError, match="does not fit the model"):
        learner.load_state(small_state())
    with_reference = Learner(make_config(algorithm={"kl": {"coef": 0.1}}))
    with pytest.raises(CheckpointError, match="reference policy"):
        with_reference.load_state(learner.state())


def test_no_checkpoints_are_an_empty_list(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path, "job_1") == []
    assert retain(tmp_path, "job_1", recorded=0, keep=1) == []


def state_with_rows(rows: int, *, changed: slice = slice(0)) -> LearnerState:
    """Return a state with two columns of ``rows`` rows, 36 bytes a row in all; the rows ``changed`` differ."""
    wide = torch.arange(8.0 * rows).view(rows, 8)
    wide[changed] = -1
    rule = {"buffer.wide": wide, "buffer.narrow": torch.arange(rows, dtype=torch.int32), "critic": torch.ones(3)}
    return LearnerState(models=small_state().models, rule=rule, columns=frozenset({"buffer.wide", "buffer.narrow"}))


def shards(path: Path) -> dict[str, int]:
    """Return the names of the shards of a checkpoint with their inodes."""
    return {one.name[:5]: one.stat().st_ino for one in sorted((path / "replay").iterdir())}


def assert_rule(path: Path, state: LearnerState) -> None:
    found = load_checkpoint(path).state.rule
    assert found.keys() == state.rule.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.rule.items())


def test_only_the_rows_that_are_new_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten rows per shard, a growing buffer writes its last shards, and a full one the shard that changed."""
    monkeypatch.setattr(replay_shards, "SHARD_BYTES", 360)
    first, second, third = state_with_rows(25), state_with_rows(38), state_with_rows(38, changed=slice(12, 14))
    paths = [save_checkpoint(tmp_path, "job_1", n, state, {}) for n, state in enumerate((first, second, third))]
    files = [shards(path) for path in paths]
    assert [len(each) for each in files] == [3, 4, 4]
    assert [name for name, node in files[1].items() if files[0].get(name) == node] == ["00000", "00001"]
    assert [name for name, node in files[2].items() if files[1].get(name) == node] == ["00000", "00002", "00003"]
    for path, state in zip(paths, (first, second, third), strict=True):
        assert_rule(path, state)
    alone = save_checkpoint(tmp_path / "elsewhere", "job_1", 2, third, {})
    assert read_manifest(alone).digest == read_manifest(paths[2]).digest, "whatever was written before"
    retain(tmp_path, "job_1", recorded=2, keep=1)
    assert not paths[0].exists()
    assert_rule(paths[2], third)


def test_without_hard_links_all_rows_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    paths = [save_checkpoint(tmp_path, "job_1", number, state_with_rows(5), {}) for number in (0, 1)]
    assert set(shards(paths[0]).values()).isdisjoint(shards(paths[1]).values())
    assert_rule(paths[1], state_with_rows(5))


@pytest.mark.parametrize("rows", [0, 1])
def test_a_buffer_of_at_most_one_row_is_stored(tmp_path: Path, rows: int) -> None:
    state = state_with_rows(rows)
    assert_rule(save_checkpoint(tmp_path, "job_1", 0, state, {}), state)


def test_a_shard_that_was_changed_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "job_1", 0, state_with_rows(5), {})
    shard = path / "replay" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"00000\.safetensors was changed"):
        load_checkpoint(path)
