"""Engines under test, each over a small peaked model, and the plain forward that judges their log-probs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines import EmbeddedEngine, Engine, UpdateMode
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling

ARCHITECTURE = ArchitectureConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
CONFIG = ModelConfig(config=ARCHITECTURE, tokenizer="char")
EOS = 2
MAX_RUNNING = 12
LENGTH = 240
PROMPT = (5, 14, 9, 18)


def peaked_model(seed: int) -> PreTrainedModel:
    """Random weights with confident predictions: an error in the cache moves log-probs by nats."""
    model = build_model(CONFIG, len(build_tokenizer(CONFIG)), seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3, generator=noise)
    return model


@functools.cache
def reference(seed: int) -> PreTrainedModel:
    """A copy that no engine touches."""
    return peaked_model(seed)


@dataclass(frozen=True)
class Bench:
    """A started engine that serves ``peaked_model(0)`` as version 0, and how to ask it."""

    engine: Engine
    prompt: tuple[int, ...] = PROMPT
    eos: int = EOS
    max_running: int = MAX_RUNNING
    length: int = LENGTH

    def ask(self, id: str, *, prompt: Sequence[int] = PROMPT, n: int = 1, **sampling: object) -> GenRequest:
        """A request of 240 tokens that does not stop early, unless ``sampling`` says otherwise."""
        wanted = {"max_new_tokens": LENGTH, "ignore_eos": True, "seed": 7, **sampling}
        return GenRequest(request_id=id, prompt_ids=list(prompt), n=n, sampling=Sampling(**wanted))

    @torch.no_grad()
    def error(
        self, sample: Sample, *, prompt: Sequence[int] = PROMPT, temperature: float = 1.0, seeds: Sequence[int] = (0,)
    ) -> float:
        """Largest deviation of a sample's log-probs from a plain forward of the version that each span names.

        ``seeds[v]`` made the weights of version v.
        """
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        worst = 0.0
        for span in sample.spans:
            logits = reference(seeds[span.version])(ids).logits[0].float() / (temperature or 1.0)
            start, stop = len(prompt) + span.start, len(prompt) + span.end
            expected = torch.log_softmax(logits[start - 1 : stop - 1], -1).gather(-1, ids[0, start:stop, None])[:, 0]
            away = (expected - torch.tensor(sample.logprobs[span.start : span.end])).abs()
            worst = max(worst, float(away.nan_to_num(nan=torch.inf).max()))
        return worst

    @torch.no_grad()
    def plain(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T, V] of what follows each token of a text, from a forward of version 0 without a cache."""
        return torch.log_softmax(reference(0)(torch.tensor([list(token_ids)])).logits[0].float(), -1)

    def weights(self, seed: int) -> dict[str, Tensor]:
        """The parameters of ``peaked_model(seed)``."""
        return {name: parameter.detach().clone() for name, parameter in reference(seed).named_parameters()}

    async def until_tokens(self, num_new: int) -> None:
        """Wait until the engine has sampled ``num_new`` more tokens."""
        goal = self.engine.generated_tokens + num_new
        async with asyncio.timeout(20):
            while self.engine.generated_tokens < goal:
                await asyncio.sleep(0.001)

    async def update(
        self,
        version: int,
        *,
        seed: int,
        mode: UpdateMode = "swap",
        guard: Callable[[], bool] | None = None,
        digest: str = "",
    ) -> float:
        """A full update to ``peaked_model(seed)``."""
        await self.engine.begin_update(version=version, digest=digest or f"d{version}", mode=mode, guard=guard)
        tensors = self.weights(seed)
        half = len(tensors) // 2
        await self.engine.load_chunk(dict(list(tensors.items())[:half]))
        await self.engine.load_chunk(dict(list(tensors.items())[half:]))
        return await self.engine.commit_update()


def embedded(model: PreTrainedModel) -> Engine:
    """Our own decoder."""
    tokenizer = build_tokenizer(CONFIG)
    return EmbeddedEngine(model, max_running=MAX_RUNNING, stop_ids=[EOS], detokenize=tokenizer.decode)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Results do not depend on it, but the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[embedded], ids=["embedded"])
async def bench(request: pytest.FixtureRequest, one_thread: None) -> AsyncIterator[Bench]:
    """Each engine in turn; a new adapter joins the list."""
    engine: Engine = request.param(peaked_model(0))
    await engine.start()
    yield Bench(engine)
    await engine.close()
