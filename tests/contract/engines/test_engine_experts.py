"""Mixtures of experts in the embedded engine: exact log-probs, and a router table that the trainer can replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines import EmbeddedEngine, open_engine
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.services.rollout.episode import group_experts
from penstock.shared.config.model import ArchitectureConfig, ExpertsConfig, ModelConfig, MoEConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models import build_model, build_tokenizer, pack, selected_logprobs
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.experts import Routes
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling

LAYERS, K = 3, 2
ARCHITECTURE = ArchitectureConfig(
    arch="qwen3_moe", hidden_size=32, intermediate_size=32, num_layers=LAYERS, num_heads=2, num_kv_heads=1,
    experts=ExpertsConfig(number=8, per_token=K),
)  # fmt: skip
CONFIG = ModelConfig(config=ARCHITECTURE, tokenizer="char", moe=MoEConfig(router_replay=True))
PROMPT = [5, 14, 9, 18]
Start = Callable[..., Awaitable[EmbeddedEngine]]


def model_of(seed: int, *, rounded: bool = False) -> PreTrainedModel:
    """Return a model with confident predictions and nearly undecided routers: small errors change a token's experts.

    With ``rounded`` the routers have the precision of bfloat16.
    """
    model = build_model(CONFIG, len(build_tokenizer(CONFIG)), seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05 if "mlp.gate" in name else 0.3, generator=noise)
        for name, parameter in model.named_parameters():
            if "mlp.gate" in name and rounded:
                parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = []

    async def begin(model: PreTrainedModel, *, record: bool = True) -> EmbeddedEngine:
        engine = EmbeddedEngine(model, max_running=6, stop_ids=[2], detokenize=str, record_routes=record)
        engines.append(engine)
        await engine.start()
        return engine

    yield begin
    for engine in engines:
        await engine.close()
    torch.set_num_threads(threads)


def ask(id: str, *, n: int = 1, tokens: int = 60) -> GenRequest:
    return GenRequest(
        request_id=id, prompt_ids=PROMPT, n=n, sampling=Sampling(max_new_tokens=tokens, ignore_eos=True, seed=7)
    )


@torch.no_grad()
def by_trainer(model: PreTrainedModel, sample: Sample, table: Tensor | None) -> Tensor:
    """Return the log-probs of a sample that the trainer computes; ``table`` replays the router."""
    ids = [*PROMPT, *sample.token_ids]
    select = torch.arange(len(PROMPT) - 1, len(ids) - 1)
    logprobs, _ = selected_logprobs(
        model, pack([ids[:-1]]), select, torch.tensor(sample.token_ids), temperature=1.0, entropy=False,
        routes=Routes(table),
    )  # fmt: skip
    return logprobs


def error(model: PreTrainedModel, sample: Sample, *, replay: bool) -> Tensor:
    table = torch.from_numpy(sample.experts) if replay and sample.experts is not None else None
    return (by_trainer(model, sample, table) - torch.tensor(sample.logprobs)).abs()


async def test_log_probs_are_those_of_the_module_and_of_the_trainer(start: Start) -> None:
    engine, model = await start(model_of(0)), model_of(0)
    for sample in (await engine.generate(ask("a", n=4))).samples:
        ids = torch.tensor([[*PROMPT, *sample.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
        assert float((expected - torch.tensor(sample.logprobs)).abs().max()) < 1e-4
        assert float(error(model, sample, replay=False).max()) < 1e-4


async def test_the_table_holds_what_the_router_chose_for_every_computed_token(start: Start) -> None:
    engine, model = await start(model_of(0)), model_of(0)
    for sample in (await engine.generate(ask("a", n=9, tokens=20))).samples:  # more than run at once: rows move
        table = sample.experts
        assert table is not None
        assert table.dtype == np.uint8
        assert table.shape == (len(PROMPT) + len(sample.token_ids) - 1, LAYERS, K)
        assert np.array_equal(np.sort(table, -1), np.sort(routes_of(model, [*PROMPT, *sample.token_ids[:-1]]), -1))


def routes_of(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    chosen: list[Tensor] = []

    class Watch:
        def choose(self, layer: int, probs_TE: Tensor, top_k: int) -> Tensor:
            chosen.append(probs_TE.topk(top_k).indices)
            return chosen[-1]

    from penstock.shared.models.decoder import _decode

    plan = plan_of(model)
    assert plan is not None
    with torch.no_grad():
        _decode(plan, pack([ids]), Watch())  # type: ignore[arg-type]
    return torch.stack(chosen, 1).numpy()


async def test_replay_closes_the_gap_that_a_perturbed_router_opens(start: Start) -> None:
    """The sampler's routers are rounded: without replay tokens go to other experts, with it only weights differ."""
    engine, trainer = await start(model_of(0, rounded=True)), model_of(0)
    samples = (await engine.generate(ask("a", n=6, tokens=200))).samples
    own = torch.cat([error(trainer, sample, replay=False) for sample in samples])
    replayed = torch.cat([error(trainer, sample, replay=True) for sample in samples])
    assert float(own.max()) > 0.5, "the perturbation sends no token elsewhere: the test proves nothing"
    assert float(replayed.max()) < 0.02
    assert float(replayed.mean()) < 0.05 * float(own.mean())


async def test_a_token_keeps_the_experts_it_was_first_computed_with(start: Start) -> None:
    engine = await start(model_of(0))
    crossing = asyncio.create_task(engine.generate(ask("crossing", tokens=200)))
    while engine.generated_tokens < 40:
        await asyncio.sleep(0.001)
    await engine.begin_update(version=1, digest="d1", mode="swap")
    await engine.load_chunk({name: p.detach() for name, p in model_of(1).named_parameters()})
    await engine.commit_update()
    sample = (await crossing).samples[0]
    assert [span.version for span in sample.spans] == [0, 1]
    computed = len(PROMPT) + sample.spans[0].end - 1  # by version 0: all but the last token of its span
    ids = [*PROMPT, *sample.token_ids]
    assert sample.experts is not None
    expected = np.concatenate([routes_of(model_of(0), ids[:computed]), routes_of(model_of(1), ids[:-1])[computed:]])
    assert np.array_equal(np.sort(sample.experts, -1), np.sort(expected, -1))


async def test_a_group_lays_the_prompt_before_the_completions(start: Start) -> None:
    engine = await start(model_of(0))
    samples = (await engine.generate(ask("a", n=3, tokens=5))).samples
    table = group_experts(samples, len(PROMPT))
    assert table is not None
    assert table.shape == (len(PROMPT) + 15, LAYERS, K)
    for i, sample in enumerate(samples):
        start_of = len(PROMPT) + 5 * i
        assert sample.experts is not None
        assert np.array_equal(table[start_of : start_of + 4], sample.experts[len(PROMPT) :])
        assert not table[start_of + 4].any()


async def test_nothing_is_recorded_unless_asked(start: Start) -> None:
    engine = await start(model_of(0), record=False)
    sample = (await engine.generate(ask("a", tokens=5))).samples[0]
    assert sample.experts is None
    assert group_experts([sample], len(PROMPT)) is None


async def test_a_table_that_misses_its_tokens_is_seen(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the replay test above can fail: a recorder that is one token late does not close the gap."""
    from penstock.services.rollout.engines.embedded.batch import RouteTable

    write = RouteTable.write
    monkeypatch.setattr(RouteTable, "write", lambda self, row, position, chosen: write(self, row, position + 1, chosen))
    engine, trainer = await start(model_of(0, rounded=True)), model_of(0)
    sample = (await engine.generate(ask("a"))).samples[0]
    assert float(error(trainer, sample, replay=True).max()) > 0.5


@pytest.mark.parametrize(("arch", "nbytes", "message"), [("qwen3", 6, "no routers"), ("qwen3_moe", 5, "6 bytes")])
def test_a_wrong_moe_section_is_named_by_the_engine(tmp_path: Any, arch: str, nbytes: int, message: str) -> None:
    experts = ARCHITECTURE.experts if arch == "qwen3_moe" else None
    saved = ModelConfig(config=ARCHITECTURE.model_copy(update={"arch": arch, "experts": experts}), tokenizer="char")
    tokenizer = build_tokenizer(saved)
    build_model(saved, len(tokenizer), seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), moe=MoEConfig(router_replay=True, replay_bytes_per_token=nbytes))
    with pytest.raises(ConfigError, match=message):
        open_engine(config, tokenizer, max_running=2, seed=0)


def test_tables_are_copies() -> None:
    model = model_of(0)
    batch = Batch(model, max_running=2, max_length=64, detokenize=str, version=0, record_routes=True)
    assert batch._routes is not None
    batch._routes.reserve(8)
    taken = batch._routes.take(0, 4)
    batch._routes._table_RCNK.fill_(3)
    assert not taken.any()
