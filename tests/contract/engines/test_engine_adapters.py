"""Engines serve the adapted policy: their log-probs match the trainer's after an update, and a lost adapter is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.rollout.engines import Engine, open_engine
from penstock.services.rollout.engines.updates import WeightUpdate
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.batch.packing import columns_of_rows, microbatches
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import Conflict, WeightsError
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.models.architecture import Adapted
from penstock.shared.models.lora import add_adapter
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling, WeightInfo
from penstock.shared.weights import digest_of_tensors

LORA = LoraConfig(rank=4)
CONFIG = ModelConfig(
    config=ArchitectureConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1),
    tokenizer="char", lora=LORA,
)  # fmt: skip
PROMPT = [5, 14, 9, 18]


def trainer_of(config: ModelConfig, seed: int = 0) -> LocalBackend:
    tokenizer = build_tokenizer(config)
    model = build_model(config, len(tokenizer), seed=seed)
    assert config.lora is not None
    add_adapter(model, config.lora, seed=seed)
    return LocalBackend(model, tokenizer, OptimizerConfig(max_grad_norm=1e9), keep_reference=True, lora=config.lora)


def train(backend: LocalBackend, steps: int = 3) -> None:
    """Train some steps that change the policy so much that every log-prob moves."""
    columns = columns_of_rows([(PROMPT, [7, 8, 9, 10]), ([4], [20, 21, 22])])
    (microbatch,) = microbatches(columns, np.arange(2), 1000)
    for _ in range(steps):
        backend.accumulate(microbatch, lambda scores: -scores.values_M.sum())
        backend.step(0.05)


def by_trainer(backend: LocalBackend, sample: Sample, *, reference: bool = False) -> Tensor:
    (microbatch,) = microbatches(columns_of_rows([(PROMPT, sample.token_ids)]), np.arange(1), 1000)
    score = backend.reference_logprobs if reference else backend.score
    return score(microbatch)


def error(backend: LocalBackend, sample: Sample) -> float:
    return float((by_trainer(backend, sample) - torch.tensor(sample.logprobs)).abs().max())


@dataclass
class Pair:
    """A trainer with an adapter, and an engine that follows it."""

    trainer: LocalBackend
    engine: Engine
    version: int = 0

    async def publish(self) -> None:
        tensors = {name: tensor.clone() for name, tensor in self.trainer.published()}
        self.version += 1
        await self.engine.begin_update(version=self.version, digest=f"d{self.version}", mode="swap")
        await self.engine.load_chunk(tensors)
        await self.engine.commit_update()

    async def sample(self, id: str = "a", tokens: int = 80) -> Sample:
        request = GenRequest(
            request_id=id, prompt_ids=PROMPT, sampling=Sampling(max_new_tokens=tokens, ignore_eos=True, seed=7)
        )
        return (await self.engine.generate(request)).samples[0]


@pytest.fixture(params=["adapters", "merged"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = CONFIG.model_copy(update={"lora": LORA.model_copy(update={"publish": request.param})})
    engine = open_engine(config, build_tokenizer(config), max_running=4, seed=0)
    await engine.start()
    yield Pair(trainer_of(config), engine)
    await engine.close()
    torch.set_num_threads(threads)


async def test_the_engine_serves_the_adapted_policy(pair: Pair) -> None:
    before = await pair.sample("before")
    assert error(pair.trainer, before) < 1e-4, "a new adapter is the base"
    train(pair.trainer)
    assert error(pair.trainer, before) > 0.1, "the trainer moved"
    await pair.publish()
    after = await pair.sample("after")
    assert [span.version for span in after.spans] == [1]
    assert error(pair.trainer, after) < 1e-4
    train(pair.trainer)
    await pair.publish()
    assert error(pair.trainer, await pair.sample("again")) < 1e-4


async def test_an_update_that_is_acknowledged_and_ignored_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the parity test above can fail: labels name version 1, but the weights are those of version 0."""
    train(pair.trainer)
    monkeypatch.setattr(WeightUpdate, "commit", lambda update: None)
    await pair.publish()
    sample = await pair.sample()
    assert [span.version for span in sample.spans] == [1]
    assert error(pair.trainer, sample) > 0.1


async def test_an_adapter_that_is_loaded_and_not_computed_is_seen(engine: Engine) -> None:
    """Show the same for a decoder that computes only the base, which is the reference policy."""
    pair = Pair(trainer_of(CONFIG), engine)
    train(pair.trainer)
    await pair.publish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapted, "__call__", lambda layer, x: layer.base(x))
        sample = await pair.sample()
    assert error(pair.trainer, sample) > 0.1
    reference = by_trainer(pair.trainer, sample, reference=True)
    torch.testing.assert_close(reference, torch.tensor(sample.logprobs), atol=1e-4, rtol=0)


@pytest.mark.long
async def test_an_update_in_flight_drops_the_caches_of_the_old_adapter(pair: Pair) -> None:
    train(pair.trainer)
    crossing = asyncio.create_task(pair.sample("crossing", tokens=240))
    while pair.engine.generated_tokens < 60:
        await asyncio.sleep(0.001)
    await pair.publish()
    sample = await crossing
    assert [span.version for span in sample.spans] == [0, 1]
    own, base = by_trainer(pair.trainer, sample), by_trainer(pair.trainer, sample, reference=True)
    cut = sample.spans[0].end
    expected = torch.cat([base[:cut], own[cut:]])
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def test_what_is_published_is_small_and_named_as_in_the_file() -> None:
    trainer = trainer_of(CONFIG)
    published, whole = list(trainer.published()), list(trainer.weights())
    assert [(n, tuple(t.shape), t.dtype) for n, t in published] == trainer.published_layout()
    assert [(n, tuple(t.shape), t.dtype) for n, t in whole] == trainer.layout()
    assert all(name.startswith("base_model.model.model.layers.") for name, _ in published)
    assert sum(t.numel() for _, t in published) < 0.3 * sum(t.numel() for _, t in whole)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    opened = open_engine(CONFIG, build_tokenizer(CONFIG), max_running=2, seed=0)
    await opened.start()
    yield opened
    await opened.close()


async def test_the_base_under_the_adapter_is_told_apart_and_replaced_once(engine: Engine) -> None:
    trainer = trainer_of(CONFIG, seed=1)
    base = {name: tensor.clone() for name, tensor in trainer.frozen()}
    digest = digest_of_tensors(base.items())
    assert trainer.environment()["base"] == digest
    assert (await engine.weight_info()).base not in ("", digest)
    await engine.begin_update(version=0, digest=digest, mode="in_place", base=True)
    await engine.load_chunk(base)
    await engine.commit_update()
    assert await engine.weight_info() == WeightInfo(version=0, digest="", dirty=False, base=digest)
    pair = Pair(trainer, engine)
    train(trainer)
    await pair.publish()
    assert error(trainer, await pair.sample()) < 1e-4
    info = await engine.weight_info()
    assert (info.version, info.base) == (1, digest)


async def test_updates_of_the_wrong_part_are_refused(engine: Engine) -> None:
    trainer = trainer_of(CONFIG)
    with pytest.raises(Conflict, match="in place"):
        await engine.begin_update(version=1, digest="d", mode="swap", base=True)
    await engine.begin_update(version=1, digest="d", mode="swap")
    with pytest.raises(WeightsError, match="no parameter"):
        await engine.load_chunk(dict(trainer.frozen()))
    await engine.begin_update(version=1, digest="d", mode="swap")
    tensors = dict(trainer.published())
    tensors.popitem()
    await engine.load_chunk(tensors)
    with pytest.raises(WeightsError, match="lacks 1 parameters"):
        await engine.commit_update()
    assert (await engine.weight_info()).version == 0


async def test_an_engine_without_an_adapter_has_no_base() -> None:
    plain = CONFIG.model_copy(update={"lora": None})
    engine = open_engine(plain, build_tokenizer(plain), max_running=2, seed=0)
    await engine.start()
    assert (await engine.weight_info()).base == ""
    with pytest.raises(Conflict, match="no adapter"):
        await engine.begin_update(version=1, digest="d", mode="in_place", base=True)
    await engine.close()
