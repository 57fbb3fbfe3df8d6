"""The embedded engine in bfloat16: its log-probs beside those of the model and of the trainer, and updates.

Bounds. A bfloat16 number has 8 bits of mantissa, so rounding to it has a relative error of at most u = 2^-8;
``rounding`` derives the error of a log-prob, as the root of the mean square over tokens (rms). Two computations in
bfloat16 round the same numbers in another order: if their errors agree in nothing, the difference has an rms of sqrt(2)
times that of one of them, and less if they agree in part. Other weights or a stale cache move these log-probs by nats.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines import EmbeddedEngine
from penstock.services.trainer.backends.base import Scores
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.batch.packing import Microbatch, columns_of_rows, microbatches
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.protocol.generation import Sample
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.weights import Staged, layout_of, open_publisher, open_receiver
from tests.contract.engines.conftest import ARCHITECTURE, CONFIG, EOS, MAX_RUNNING, PROMPT, Bench

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
ROUNDINGS_PER_LAYER, OTHER_ROUNDINGS = 12, 3
"""Numbers that are rounded one after the other: in a layer two norms, queries or keys or values, their rotation, the
attention, its projection, gate and up, activation, product, projection, two sums; beside them the last norm, logits."""
STRAYS = 10
"""Largest error of one token, in rms of all tokens: large errors come with rare, unlikely tokens."""
SEEDS = range(2)


def peaked(seed: int, *, wide: bool) -> PreTrainedModel:
    """Return a bfloat16 model with confident predictions; ``wide``: with logits in float32."""
    config = CONFIG.model_copy(update={"dtype": "bfloat16", "fp32_head": wide})
    model = build_model(config, len(build_tokenizer(config)), seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.3)
    return model


def trainer(model: PreTrainedModel) -> LocalBackend:
    """Return a trainer of a copy of ``model``."""
    return LocalBackend(
        copy.deepcopy(model), build_tokenizer(CONFIG), OptimizerConfig(), keep_reference=False, device="cpu",
        role="policy", lora=None,
    )  # fmt: skip


@asynccontextmanager
async def serving(model: PreTrainedModel) -> AsyncIterator[Bench]:
    engine = EmbeddedEngine(
        copy.deepcopy(model), max_running=MAX_RUNNING, stop_ids=[EOS], detokenize=build_tokenizer(CONFIG).decode
    )
    await engine.start()
    try:
        yield Bench(engine)
    finally:
        await engine.close()


@torch.no_grad()
def forward(model: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return log-probs [T] of a sample's tokens from the model's own forward pass, and the logits [T, V]."""
    ids = torch.tensor([[*PROMPT, *sample.token_ids]])
    logits_TV = model(ids).logits[0, len(PROMPT) - 1 : -1].float()
    chosen = torch.log_softmax(logits_TV, -1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    return chosen, logits_TV


def microbatch(samples: list[Sample], temperature: float = 1.0) -> Microbatch:
    columns = columns_of_rows([(list(PROMPT), list(sample.token_ids)) for sample in samples])
    columns = replace(columns, temperature_B=np.full(len(samples), temperature, np.float32))
    (packed,) = microbatches(columns, np.arange(len(samples)), 10_000)
    return packed


def logprobs(samples: list[Sample]) -> Tensor:
    return torch.cat([torch.tensor(sample.logprobs) for sample in samples])


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def rounding(logits_TV: Tensor) -> float:
    """Return the largest error of log-probs that rounding to bfloat16 explains (rms).

    On the way to a logit n numbers are rounded, each with a relative error of at most u, and independently of the
    others. So the logits move by at most sqrt(n) u times their deviation from their mean. A log-prob has about the
    error of its logit, because that of the normaliser is an average. (Errors are evenly distributed within u rather
    than at it, so the expected rms is smaller by sqrt(3): 0.0205 here, where 0.0185 to 0.0211 were measured.)
    """
    steps = ROUNDINGS_PER_LAYER * ARCHITECTURE.num_layers + OTHER_ROUNDINGS
    return UNIT * math.sqrt(steps) * float((logits_TV - logits_TV.mean(-1, keepdim=True)).std())


def check(errors: Tensor, bound: float) -> None:
    """Check the errors of many log-probs against the bound of their rms."""
    assert rms(errors) <= bound
    assert float(errors.abs().max()) <= STRAYS * bound


@pytest.mark.parametrize("wide", [False, True], ids=["narrow head", "float32 head"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_logprobs_differ_from_model_and_trainer_by_rounding_alone(seed: int, wide: bool) -> None:
    model = peaked(seed, wide=wide)
    async with serving(model) as bench:
        samples = (await bench.engine.generate(bench.ask("a", n=3, max_new_tokens=120))).samples
    exact_model = copy.deepcopy(model).float()
    own = torch.cat([forward(model, sample)[0] for sample in samples])
    exact, logits = (torch.cat(parts) for parts in zip(*(forward(exact_model, s) for s in samples), strict=True))
    scored = trainer(model).score(microbatch(samples)).float()
    bound = rounding(logits)
    check(logprobs(samples) - exact, bound)
    check(own - exact, bound)
    apart = math.sqrt(2) * rms(own - exact)
    check(logprobs(samples) - own, apart)
    check(logprobs(samples) - scored, apart)
    assert rms(own - exact) > bound / 10, "the model computed in bfloat16"


async def test_logprobs_at_a_temperature_agree_with_the_trainer() -> None:
    model = peaked(0, wide=False)
    async with serving(model) as bench:
        samples = (await bench.engine.generate(bench.ask("a", n=3, max_new_tokens=120, temperature=0.7))).samples
    scored = trainer(model).score(microbatch(samples, 0.7)).float()
    logits = torch.cat([forward(model, sample)[1] for sample in samples])
    check(logprobs(samples) - scored, math.sqrt(2) * rounding(logits) / 0.7)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[ServiceSettings, ServiceSettings]]:
    """Yield the settings of a trainer and of a worker on another host."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = ServiceSettings(host_id="here", shm_dir=tmp_path / "here", bulk_host="127.0.0.1")
    yield here, ServiceSettings(host_id="there", shm_dir=tmp_path / "there")


def nll(scores: Scores) -> Tensor:
    return -scores.values_M.sum()


def trained(backend: LocalBackend, samples: list[Sample]) -> LocalBackend:
    """Make an optimizer step on samples, whose log-probs it moves by far more than rounding does."""
    backend.accumulate(microbatch(samples), nll, entropy=False)
    backend.step(3e-2)
    return backend


@pytest.mark.parametrize("where", ["shm", "tcp"])
async def test_an_update_keeps_bfloat16_on_the_wire_and_every_bit(
    hosts: tuple[ServiceSettings, ServiceSettings], where: str
) -> None:
    """The weights of the second version are those of a trainer after a step on samples of the first one."""
    here, there = hosts
    model = peaked(0, wide=False)
    backend = trainer(model)
    publisher = open_publisher("job_bf16", layout_of(backend.published()), here)
    receiver = open_receiver(here if where == "shm" else there)
    try:
        async with serving(model) as bench:
            crossing = asyncio.create_task(bench.engine.generate(bench.ask("crossing", n=3, max_new_tokens=120)))
            first = (await bench.engine.generate(bench.ask("first", n=3, max_new_tokens=30))).samples
            trained(backend, first)
            manifest = publisher.publish(backend.published(), version=1, epoch=1)
            staged = receiver.stage(manifest)
            check_wire(manifest, staged, backend, where)
            await load(bench.engine, manifest, staged.tensors())
            samples = (await crossing).samples
            check_bits(bench.engine, backend)
            staged.release()
    finally:
        receiver.close()
        publisher.close()
    assert all([span.version for span in sample.spans] == [0, 1] for sample in samples)
    old, new = trainer(model).score(microbatch(samples)).float(), backend.score(microbatch(samples)).float()
    is_new = torch.cat([torch.arange(len(s.token_ids)) >= s.spans[1].start for s in samples])
    bound = math.sqrt(2) * rounding(torch.cat([forward(model, sample)[1] for sample in samples]))
    check(logprobs(samples) - torch.where(is_new, new, old), bound)
    assert rms((new - old)[is_new]) > 5 * bound, "log-probs of the two versions are told apart"


def check_wire(manifest: WeightManifest, staged: Staged, backend: LocalBackend, where: str) -> None:
    published = dict(backend.published())
    assert {spec.dtype for spec in manifest.layout.tensors} == {"bfloat16"}
    assert manifest.layout.nbytes < sum(2 * tensor.numel() + 64 for tensor in published.values())
    assert (staged.way.transport, staged.way.fetched_bytes) == (where, manifest.layout.nbytes if where == "tcp" else 0)
    for name, tensor in published.items():
        assert staged.tensors()[name].dtype == torch.bfloat16
        assert staged.tensors()[name].equal(tensor), name


def check_bits(engine: object, backend: LocalBackend) -> None:
    assert isinstance(engine, EmbeddedEngine)
    served = engine._policy_parameters()
    for name, tensor in backend.published():
        assert (served[name].dtype, served[name].equal(tensor)) == (torch.bfloat16, True), name


async def load(engine: object, manifest: WeightManifest, tensors: dict[str, Tensor]) -> None:
    assert isinstance(engine, EmbeddedEngine)
    await engine.begin_update(version=manifest.version, digest=manifest.digest, mode="swap")
    await engine.load_chunk(tensors)
    await engine.commit_update()
    assert (await engine.weight_info()).digest == manifest.digest


async def test_weights_of_another_dtype_are_refused() -> None:
    model = peaked(0, wide=False)
    async with serving(model) as bench:
        await bench.engine.begin_update(version=1, digest="d1", mode="swap")
        with pytest.raises(WeightsError, match=r"is torch\.float32"):
            await bench.engine.load_chunk({name: tensor.float() for name, tensor in model.named_parameters()})
        assert (await bench.engine.weight_info()).version == 0
