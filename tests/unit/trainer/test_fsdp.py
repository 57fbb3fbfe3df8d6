"""A model sharded over ranks is the same model: equal losses, log-probs and weights, also after crashes.

Bounds. Float32: ranks add the same gradients in another order, and their norm in float64: some ulp, which Adam with eps
1e-3 and learning rate 1e-2 passes on at most tenfold. bfloat16: 8 bits of mantissa in every activation.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.trainer.checkpoint.state import (
    help_save,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_share,
)
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.collective import Alone
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard, assign
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]
Batches = list[list[Group]]
Run = tuple[list[dict[str, float]], dict[str, Any], dict[str, Any]]
"""Metrics of each update, weights, first moments."""

UPDATES = 5
FSDP = {"backend": {"type": "fsdp"}}
SETUP = {
    "train": {"batch_size": 24, "minibatches": 2, "max_tokens_per_microbatch": 128},
    "optimizer": {"eps": 1e-3, "max_grad_norm": 0.5},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"group_size": 4, "kl": {"coef": 0.1}, "entropy_coef": 0.01}},
    "full_kl": {"algorithm": {"group_size": 4, "kl": {"coef": 0.1, "estimator": "full"}}},
    "ppo": {
        "algorithm": {"type": "ppo", "group_size": 4, "critic": {"optimizer": {"learning_rate": 1e-2, "eps": 1e-3}}}
    },
    "bfloat16": {"algorithm": {"group_size": 4}, "model": {"dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-3}},
}
BOUNDS = {"bfloat16": 2e-2}
"""Bound on differences of weights after all updates; 1e-5 for float32."""


def train(
    rank: Any, config: JobConfig, batches: Batches, *, first: int = 0, load: Path | None = None
) -> tuple[Learner, list[dict[str, float]]]:
    """Train ``batches`` as the updates from ``first`` on; return the learner and the metrics of each update."""
    learner = Learner(config, collective=rank)
    if load is not None:
        verify_share(load, rank=rank.rank, ranks=rank.size)
        learner.load_state(load_checkpoint(load, into=learner.state(), verified=True).state)
    metrics = []
    for index, groups in enumerate(batches, first):
        tokens = [len(group.token_ids) for group in groups]
        owner = assign(tokens, minibatches=config.train.minibatches, ranks=rank.size)
        own = np.flatnonzero(owner == rank.rank).tolist()
        shard = BatchShard([groups[i] for i in own], own, len(groups))
        metrics.append(learner.update(shard, update_index=index))
    return learner, metrics


def outcome(learner: Learner, metrics: list[dict[str, float]]) -> Run:
    """Return metrics, weights and first moments as arrays that tests can compare."""
    weights = {name: tensor.float().clone().numpy() for name, tensor in learner.weights()}
    policy = learner.state().models["policy"]
    moments = {key: whole(t).numpy() for key, t in policy.optimizer.items() if key.startswith("exp_avg.")}
    return metrics, weights, moments


def whole(tensor: Any) -> torch.Tensor:
    """Return ``tensor``, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_all(world: World, cases: dict[str, tuple[JobConfig, Batches]]) -> dict[str, Run]:
    """Train every case, one after another; return the results by name."""
    return {name: outcome(*train(world.everybody, config, data)) for name, (config, data) in cases.items()}


def train_and_save(world: World, config: JobConfig, batches: Batches, load: Path | None, root: Path) -> Run:
    """Train ``batches`` from checkpoint ``load``, if any, and save a checkpoint at the end; return the results."""
    first = 0 if load is None else load_checkpoint(load).number
    learner, metrics = train(world.everybody, config, batches, first=first, load=load)
    state, number = learner.state(), first + len(batches)
    if world.place.rank == 0:
        save_checkpoint(root, "job_1", number, state, {"version": number}, token="t", ranks=world.checkpoints)
    else:
        help_save(root, "job_1", number, state, token="t", ranks=world.checkpoints)
    return outcome(learner, metrics)


def load_damaged(world: World, config: JobConfig, path: Path) -> str:
    """Return why this rank refuses the checkpoint, or '' if it accepts it."""
    learner, place = Learner(config, collective=world.everybody), world.place
    try:
        verify_share(path, rank=place.rank, ranks=place.size)
        if place.size == 1:
            load_checkpoint(path, into=learner.state())
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def batches(ragged_batches: Callable[[int], Batches]) -> Batches:
    """Return one batch more than `test_ranks_train_the_same_policy` uses."""
    return ragged_batches(UPDATES + 1)


def differences(ours: Run, theirs: Run) -> dict[str, float]:
    """Return the largest absolute differences between two runs, by quantity."""
    found = {
        "weights": max(np.abs(ours[1][name] - theirs[1][name]).max() for name in theirs[1]),
        "moments": max(np.abs(ours[2][name] - theirs[2][name]).max() for name in theirs[2]),
    }
    for key in ("loss/total", "policy/entropy", "policy/approx_kl", "optimizer/grad_norm", "mismatch/logprob"):
        found[key] = max(abs(a[key] - b[key]) for a, b in zip(ours[0], theirs[0], strict=True) if key in b)
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_train_the_same_policy(ranks: Any, make_config: Config, batches: Batches) -> None:
    data = batches[:UPDATES]
    sections = {
        name: {key: {**SETUP.get(key, {}), **variant.get(key, {})} for key in {*SETUP, *variant}}
        for name, variant in VARIANTS.items()
    }
    local = {name: outcome(*train(Alone(), make_config(**sections[name]), data)) for name in VARIANTS}
    cases = {name: (make_config(**sections[name], **FSDP), data) for name in VARIANTS}
    for size in (1, 2, 3):
        wanted = cases if size == 2 else {name: cases[name] for name in ("grpo", "ppo")}
        for found in ranks.run(size, train_all, wanted):
            for name in wanted:
                worst = differences(found[name], local[name])
                bound = BOUNDS.get(name, 1e-5)
                assert worst["weights"] <= bound, (size, name, worst)
                assert all(value <= max(bound, 1e-6) * 10 for value in worst.values()), (size, name, worst)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_crash_and_resume_on_other_numbers_of_ranks(
    ranks: Any, make_config: Config, batches: Batches, tmp_path: Path
) -> None:
    sections = {**SETUP, "algorithm": VARIANTS["grpo"]["algorithm"]}
    config = make_config(**sections, **FSDP)
    uninterrupted = outcome(*train(Alone(), make_config(**sections), batches))
    metrics: list[dict[str, float]] = []
    path, run = None, None
    for part, size in enumerate((2, 1, 3)):
        run = ranks.run(size, train_and_save, config, batches[2 * part : 2 * part + 2], path, tmp_path)[0]
        metrics += run[0]
        path = list_checkpoints(tmp_path, "job_1")[-1].path
    assert run is not None
    assert path is not None
    worst = differences((metrics, run[1], run[2]), uninterrupted)
    assert worst["weights"] <= 1e-5, worst
    assert worst["loss/total"] <= 1e-5, worst

    # the last checkpoint, of 3 ranks: as a model directory, and in the backend `local`
    exported = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    assert all(np.array_equal(exported[name].detach().numpy(), value) for name, value in run[1].items())
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("1+2=")["input_ids"]
    assert tokenizer.chat_template
    alone = Learner(make_config(**sections))
    alone.load_state(load_checkpoint(path).state)
    _, weights, moments = outcome(alone, [])
    assert all(np.array_equal(weights[name], value) for name, value in run[1].items())
    assert all(np.array_equal(moments[name], value) for name, value in run[2].items())

    # and from `local` back onto ranks
    back = save_checkpoint(tmp_path, "job_2", 6, alone.state(), {})
    (_, weights, moments), *_ = ranks.run(2, train_and_save, config, [], back, tmp_path / "again")
    assert all(np.array_equal(weights[name], value) for name, value in run[1].items())
    assert all(np.array_equal(moments[name], value) for name, value in run[2].items())

    # damage
    shard = path / "shards" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    errors = ranks.run(2, load_damaged, config, path)
    (message,) = [message for message in errors if message]
    assert message == f"{shard} was changed after the checkpoint was written: use another checkpoint"
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp was changed"):
        load_checkpoint(path)
    wider = {"config": {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2}, "tokenizer": "char"}
    other = make_config(**sections, **FSDP, model=wider)
    assert "does not fit the model" in ranks.run(1, load_damaged, other, back)[0]


def save_thrice(world: World, config: JobConfig, root: Path) -> list[str]:
    """Save three checkpoints, the first of which a file in the way prevents; return each error of this rank, or ''."""
    state, errors = Learner(config, collective=world.everybody).state(), []
    for attempt in range(3):
        if world.place.rank == 0 and attempt == 0:
            root.write_text("in the way")
        if world.place.rank == 0 and attempt == 1:
            root.unlink()
        world.everybody.agree(True)
        try:
            if world.place.rank == 0:
                save_checkpoint(root, "job_1", attempt, state, {}, token=f"t{attempt}", ranks=world.checkpoints)
            else:
                help_save(root, "job_1", attempt, state, token=f"t{attempt}", ranks=world.checkpoints)
        except CheckpointError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


@pytest.mark.slow
def test_a_checkpoint_that_fails_on_one_rank_fails_on_all(ranks: Any, make_config: Config, tmp_path: Path) -> None:
    for errors in ranks.run(2, save_thrice, make_config(**FSDP), tmp_path / "checkpoints"):
        assert "rank 0 cannot begin a checkpoint" in errors[0]
        assert errors[1:] == ["", ""]
    assert [stored.manifest.number for stored in list_checkpoints(tmp_path / "checkpoints", "job_1")] == [1, 2]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch", "float32.__reduce__"),
        ("torch", "load"),
    ],
)
def test_the_table_of_shards_names_its_own_types_only(tmp_path: Path, module: str, name: str) -> None:
    from penstock.services.trainer.checkpoint.sharded_tensors import METADATA, shard_table

    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    call = b"\x8c\x04true\x85R."  # a call of the object that the two names give, with "true"
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + strings + b"\x93" + call)
    with pytest.raises(CheckpointError, match=f"'{module}.{name}' has no place in a table of tensors"):
        shard_table(tmp_path)


def test_the_table_of_shards_is_read_as_every_python_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 writes a member of an enumeration as an attribute of its class."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from penstock.services.trainer.checkpoint.sharded_tensors import METADATA, read_shards, shard_table, write_shards

    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    write_shards(tmp_path, {"a": torch.arange(3.0)}, None)
    assert b"getattr" in (tmp_path / METADATA).read_bytes()
    target = torch.zeros(3)
    read_shards(tmp_path, {"a": target})
    assert target.tolist() == [0.0, 1.0, 2.0]
    assert shard_table(tmp_path) == [("a", (3,), torch.float32)]


@pytest.mark.parametrize("name", ["__class__", "mro", "NO_SUCH_FORMAT", "__init_subclass__"])
def test_the_table_of_shards_reads_no_other_attribute(tmp_path: Path, name: str) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from penstock.services.trainer.checkpoint.sharded_tensors import METADATA, shard_table

    class Evil:
        def __reduce__(self) -> Any:
            return (getattr, (_MEM_FORMAT_ENCODING, name))

    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="no place in a table of tensors"):
        shard_table(tmp_path)


def test_the_table_of_shards_runs_no_code(tmp_path: Path) -> None:
    from penstock.services.trainer.checkpoint.sharded_tensors import METADATA, shard_table

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="has no place in a table of tensors"):
        shard_table(tmp_path)
    assert not (tmp_path / "owned").exists()
