"""Adapters and experts sharded over ranks train as in one process, and every backend reads their checkpoints.

Bounds. Float32, six AdamW steps with learning rate and eps 1e-3: ranks add the same gradients in another order, and a
step passes on at most lr / eps = 1 times an absolute error; first moments show the gradients themselves. bfloat16: 8
bits of mantissa in every activation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.services.rollout.engines import open_engine
from penstock.services.trainer.batch.packing import columns_of_rows, microbatches
from penstock.services.trainer.checkpoint.export import export
from penstock.services.trainer.checkpoint.state import (
    help_save,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_share,
)
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.heartbeats import Threads
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard, assign
from penstock.services.trainer.replica import Replica
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.prompts import Demonstration
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.protocol.generation import GenRequest, Sampling
from penstock.shared.protocol.trajectory import Group
from penstock.shared.protocol.weights import WeightRoutes

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
Config = Callable[..., JobConfig]
Batches = list[list[Group]]
Tensors = dict[str, NDArray[np.float32]]
Run = tuple[list[dict[str, float]], Tensors, Tensors, Tensors]
"""Metrics of each update, what is published, the weights under an adapter, first moments."""

UPDATES, LAYERS, EXPERTS, PER_TOKEN = 3, 2, 6, 2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": LAYERS, "max_position_embeddings": 64}
SPARSE = {**SIZES, "arch": "qwen3_moe", "intermediate_size": 32, "experts": {"number": EXPERTS, "per_token": PER_TOKEN}}
FSDP = {"type": "fsdp"}
FRUGAL = {"type": "fsdp", "activation_checkpointing": True, "cpu_offload": True}
ROWS = [Demonstration(p, a, [1] * len(a)) for p, a in (([5, 6], [7, 2]), ([9], [8, 8, 2]), ([11, 4], [2]))]
"""Demonstrations of the warm start."""
CASES: dict[str, dict[str, Any]] = {
    "adapters": {
        "model": {"lora": {"rank": 4}}, "algorithm": {"kl": {"coef": 0.1}}, "warm_start": {"steps": 2},
        "backend": FSDP,
    },
    "full_kl": {
        "model": {"lora": {"rank": 3, "rslora": True, "target_modules": ["q_proj", "down_proj"]}},
        "algorithm": {"kl": {"coef": 0.1, "estimator": "full"}}, "backend": FRUGAL,
    },
    "adapted_experts": {"model": {"config": SPARSE, "lora": {"rank": 4, "publish": "merged"}}, "backend": FSDP},
    "bfloat16": {
        "model": {"dtype": "bfloat16", "lora": {"rank": 4}}, "algorithm": {"kl": {"coef": 0.1}}, "backend": FSDP,
    },
    "balanced": {
        "model": {"config": SPARSE, "moe": {"aux_loss_coef": 0.5}},
        "algorithm": {"kl": {"coef": 0.1, "estimator": "full"}}, "backend": FRUGAL,
    },
    "replayed": {
        "model": {"config": SPARSE, "moe": {"aux_loss_coef": 0.5, "router_replay": True}}, "backend": FSDP,
    },
}  # fmt: skip
TINY = ModelConfig(config=SIZES, tokenizer="char")
ON_DISK: dict[str, Any] = {
    "algorithm": {"kl": {"coef": 0.1}}, "backend": FRUGAL, "optimizer": {"learning_rate": 0.05},
}  # fmt: skip
"""Sections of a job with large steps, so that the policy moves a lot."""
BOUNDS = {"bfloat16": 1e-2}
"""Bound on differences of weights after all updates; 1e-6 for float32."""


def learner_of(collective: Collective, config: JobConfig, load: Path | None = None) -> Learner:
    """Return a learner at version 0, or with the state of checkpoint ``load``."""
    learner = Learner(config, collective=collective)
    if load is None and config.warm_start.steps:
        learner.warm_start([ROWS] * config.warm_start.steps)
    if load is not None:
        verify_share(load, rank=collective.rank, ranks=collective.size)
        into = None if config.backend.type == "local" else learner.state()
        learner.load_state(load_checkpoint(load, into=into, verified=True).state)
    return learner


def train(learner: Learner, collective: Collective, config: JobConfig, batches: Batches) -> list[dict[str, float]]:
    """Train this rank's groups of every batch; return the metrics of each update."""
    metrics = []
    for index, groups in enumerate(batches):
        owner = assign([len(g.token_ids) for g in groups], minibatches=config.train.minibatches, ranks=collective.size)
        own = np.flatnonzero(owner == collective.rank).tolist()
        metrics.append(learner.update(BatchShard([groups[i] for i in own], own, len(groups)), update_index=index))
    return metrics


def outcome(learner: Learner, metrics: list[dict[str, float]]) -> Run:
    """Return metrics, weights and first moments as arrays that tests can compare."""
    published, frozen = (
        {name: tensor.float().clone().numpy() for name, tensor in found}
        for found in (learner.weights(), learner.frozen())
    )
    moments = {
        key: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy()
        for key, tensor in learner.state().models["policy"].optimizer.items()
        if key.startswith("exp_avg.")
    }
    return metrics, published, frozen, moments


def run(collective: Collective, config: JobConfig, batches: Batches) -> Run:
    """Train all updates from version 0; return the results."""
    learner = learner_of(collective, config)
    return outcome(learner, train(learner, collective, config, batches))


def run_all(world: World, cases: dict[str, tuple[JobConfig, Batches]]) -> dict[str, Run]:
    """Train every case, one after another; return the results by name."""
    return {name: run(world.everybody, config, batches) for name, (config, batches) in cases.items()}


def run_and_save(world: World, jobs: list[tuple[str, JobConfig, Path | None]], batches: Batches, root: Path) -> Any:
    """Train and save each job; return its results, its merged weights and the digest of its base weights."""
    found = []
    for job, config, load in jobs:
        learner = learner_of(world.everybody, config, load)
        metrics = train(learner, world.everybody, config, batches)
        merged = {name: tensor.float().clone().numpy() for name, tensor in learner._policy.weights()}
        state, meta = learner.state(), {"config": config.model_dump_json()}
        if world.place.rank == 0:
            save_checkpoint(root, job, len(batches), state, meta, token="t", ranks=world.checkpoints)
        else:
            help_save(root, job, len(batches), state, token="t", ranks=world.checkpoints)
        found.append((outcome(learner, metrics), merged, learner.base_digest))
    return found


def score(world: World, config: JobConfig, load: Path, prompt: list[int], answer: list[int]) -> list[list[float]]:
    """Return the log-probs of ``answer`` under the policy in a checkpoint, and under its reference."""
    learner = learner_of(world.everybody, config, load)
    (microbatch,) = microbatches(columns_of_rows([(prompt, answer)]), np.arange(1), 1000)
    policy = learner._policy
    return [by(microbatch).tolist() for by in (policy.score, policy.reference_logprobs)]


def publish(world: World, config: JobConfig, directory: Path) -> list[tuple[str, str]]:
    """Publish two versions after a warm start; return the announced and the written digest of the base for each."""

    async def run() -> list[tuple[str, str]]:
        threads, found = Threads(), []
        replica = Replica(None, "job_1", config, world=world, threads=threads, checkpoints=directory)  # type: ignore[arg-type]
        publishing = Publishing(None, ServiceSettings(data_dir=directory, shm_dir=directory), "job_1")  # type: ignore[arg-type]
        routes = WeightRoutes(epoch=0, transports={})
        await replica.open()
        await replica.warm_start(lambda step, loss: None)
        for version in range(2):
            if world.place.rank:
                await replica.gather_weights()
                continue
            manifest = await replica.write(partial(publishing._write, version, 1, None, routes))
            base, publishing._base_manifest = publishing._base_manifest, None
            found.append((manifest.base, base.digest if base is not None else ""))
        publishing.close()
        threads.close()
        return found

    return asyncio.run(run())


def refusal(world: World, config: JobConfig, load: Path) -> str:
    """Return why this rank refuses the checkpoint, or '' if it loads it."""
    try:
        learner_of(world.everybody, config, load)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """Save a small model; return its directory."""
    tokenizer = build_tokenizer(TINY)
    build_model(TINY, len(tokenizer), seed=1).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def path_model(directory: Path) -> dict[str, Any]:
    """Return the ``model`` section of a job with an adapter on the model in ``directory``."""
    return {"config": None, "path": str(directory), "tokenizer": None, "lora": {"rank": 4}}


@pytest.fixture
def batches(ragged_batches: Callable[[int], Batches]) -> Batches:
    """Return the batches of all updates."""
    return ragged_batches(UPDATES)


def with_tables(batches: Batches) -> Batches:
    """Return ``batches`` with random router tables."""
    rng = np.random.default_rng(0)

    def tabled(group: Group) -> Group:
        shape = (len(group.prompt_ids) + len(group.token_ids), LAYERS, EXPERTS)
        return replace(group, experts=rng.random(shape).argsort(-1)[..., :PER_TOKEN].astype(np.uint8))

    return [[tabled(group) for group in groups] for groups in batches]


@pytest.fixture
def job(make_config: Config) -> Config:
    """Return a function that builds a job with small steps and a large ``eps``; ``local`` drops its backend section."""

    def make(sections: dict[str, Any], *, local: bool = False) -> JobConfig:
        chosen = {
            "optimizer": {"learning_rate": 1e-3, "eps": 1e-3},
            "train": {"batch_size": 24, "minibatches": 2, "max_tokens_per_microbatch": 128},
            **sections,
        }
        chosen["model"] = {"config": SIZES, **sections["model"]}
        if local:
            chosen.pop("backend")
        return make_config(**chosen)

    return make


def differences(ours: Run, theirs: Run) -> dict[str, float]:
    """Return the largest differences between two runs, by group of tensors and by metric."""
    found = {}
    for what, own, others in zip(("published", "frozen", "moments"), ours[1:], theirs[1:], strict=True):
        assert own.keys() == others.keys(), what
        found[what] = max((float(np.abs(own[name] - others[name]).max()) for name in others), default=0.0)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a.keys() == b.keys()
        for key in b:
            if not key.startswith(("update_s/", "speed/")):
                found[key] = max(found.get(key, 0.0), abs(a[key] - b[key]) / max(1.0, abs(b[key])))
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_train_the_same_adapters_and_experts(ranks: Any, job: Config, batches: Batches) -> None:
    data = {name: with_tables(batches) if name == "replayed" else batches for name in CASES}
    alone = {name: run(Alone(), job(sections, local=True), data[name]) for name, sections in CASES.items()}
    cases = {name: (job(sections), data[name]) for name, sections in CASES.items()}
    for size in (1, 2, 3):
        wanted = cases if size == 2 else {name: cases[name] for name in ("adapters", "balanced")}
        for found in ranks.run(size, run_all, wanted):
            for name in wanted:
                worst = differences(found[name], alone[name])
                bound = BOUNDS.get(name, 1e-6)
                assert max(worst["published"], worst["frozen"]) <= bound, (size, name, worst)
                assert max(worst.values()) <= 20 * bound, (size, name, worst)
    for name in ("balanced", "replayed"):
        assert alone[name][0][0]["moe/load_max"] > 1.05, "the load is even: the test proves nothing"
    assert all(".lora_" in name for name in alone["adapters"][1])
    assert all(".lora_" in key for key in alone["adapters"][3])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_checkpoints_go_from_ranks_to_one_process_and_back(
    ranks: Any, job: Config, batches: Batches, on_disk: Path, tmp_path: Path
) -> None:
    sections = {
        "path": {**ON_DISK, "model": path_model(on_disk)},
        "narrow": {**ON_DISK, "model": {**path_model(on_disk), "dtype": "bfloat16"}},
        "warm": CASES["adapters"],
        "experts": CASES["balanced"],
    }
    cut = {name: job(section) for name, section in sections.items()}
    whole = {name: job(section, local=True) for name, section in sections.items()}
    jobs = [(name, config, None) for name, config in cut.items()]
    first, *others = ranks.run(2, run_and_save, jobs, batches[:2], tmp_path)
    assert all([digest for *_, digest in other] == [digest for *_, digest in first] for other in others)

    back, resumed = [], {}
    for name, (result, merged, digest) in zip(cut, first, strict=True):
        path = list_checkpoints(tmp_path, name)[-1].path
        names = {file.name for file in path.iterdir()}
        assert "shards" in names
        assert ({"adapter_model.safetensors", "adapter_config.json"} <= names) is (name != "experts")
        assert ("model.safetensors" in names) is (name in ("warm", "experts"))
        alone = learner_of(Alone(), whole[name], path)
        assert alone.base_digest == digest
        assert all(np.array_equal(result[1][key], tensor.float().numpy()) for key, tensor in alone.weights())
        assert all(np.array_equal(result[2][key], tensor.float().numpy()) for key, tensor in alone.frozen())
        export(path, tmp_path / f"export-{name}")
        exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / f"export-{name}").named_parameters())
        assert all(np.allclose(exported[key].float().detach(), value, atol=1e-6) for key, value in merged.items())
        kept = save_checkpoint(tmp_path / "local", name, 2, alone.state(), {"config": whole[name].model_dump_json()})
        back.append((name, cut[name], kept))
        resumed[name] = outcome(alone, train(alone, Alone(), whole[name], batches[2:]))

    for found in ranks.run(3, run_and_save, back, batches[2:], tmp_path / "again"):  # one rank has no row of an adapter
        for name, (result, _, digest), (*_, before) in zip(cut, found, first, strict=True):
            worst = differences(result, resumed[name])
            assert max(worst["published"], worst["moments"]) <= (0.2 if name == "narrow" else 1e-5), (name, worst)
            assert worst["frozen"] == 0, name
            assert digest == before


@pytest.mark.long
@pytest.mark.slow
async def test_the_engine_serves_the_adapters_that_ranks_publish(
    ranks: Any, job: Config, batches: Batches, on_disk: Path, tmp_path: Path
) -> None:
    config = job({**ON_DISK, "model": path_model(on_disk)})
    [(result, _, digest)] = ranks.run(2, run_and_save, [("job", config, None)], batches[:2], tmp_path)[0]
    path = list_checkpoints(tmp_path, "job")[-1].path
    engine = open_engine(config.model, build_tokenizer(config.model), max_running=1, seed=0)
    await engine.start()
    assert (await engine.weight_info()).base == digest
    await engine.begin_update(version=1, digest="d", mode="swap")
    await engine.load_chunk({name: torch.from_numpy(value) for name, value in result[1].items()})
    await engine.commit_update()
    prompt, sampling = [5, 14, 9, 18], Sampling(max_new_tokens=40, ignore_eos=True, seed=7)
    sample = (await engine.generate(GenRequest(request_id="a", prompt_ids=prompt, sampling=sampling))).samples[0]
    await engine.close()
    own, reference = ranks.run(2, score, config, path, prompt, list(sample.token_ids))[0]
    assert np.abs(np.array(own) - sample.logprobs).max() < 1e-4
    assert np.abs(np.array(reference) - sample.logprobs).max() > 0.1

    build_model(TINY, len(build_tokenizer(TINY)), seed=2).save_pretrained(on_disk)
    for error in ranks.run(2, refusal, config, path):
        assert "give the model that the job was started with" in error


@pytest.mark.slow
def test_the_weights_of_a_warm_start_are_published_once_by_all_ranks(ranks: Any, job: Config, tmp_path: Path) -> None:
    (announced, written), again = ranks.run(2, publish, job(CASES["adapters"]), tmp_path)[0]
    assert announced == written != ""
    assert again == (announced, "")


def test_an_offloaded_reference_is_refused_where_it_shares_the_weights(job: Config) -> None:
    backend = {"type": "fsdp", "offload_reference": True}
    with pytest.raises(ConfigError, match=r"model\.lora.*shares the weights.*cpu_offload"):
        job({"model": {"lora": {}}, "backend": backend})
