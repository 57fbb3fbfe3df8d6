"""The engine `transformers` on architectures that our own decoder does not know, beside the trainer's log-probs."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
)

from penstock.services.rollout.engines import TransformersEngine, open_engine, transformers
from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.transformers import ModuleBatch, longest_text
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.batch.packing import columns_of_rows, microbatches
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rollout import TransformersConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models import build_tokenizer, supports
from penstock.shared.protocol.generation import Constraint, GenRequest, Sample, Sampling

TOKENIZER = build_tokenizer(ModelConfig.parse({"config": {}, "tokenizer": "char"}))
SIZE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENDS = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = GPT2Config(n_positions=96, n_embd=32, n_layer=2, n_head=4, **ENDS)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "gpt2": GPT2,
    "gpt-neox": GPTNeoXConfig(**{key: SIZE[key] for key in SIZE if key not in ("num_key_value_heads", "head_dim")}),
    "opt": OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=96, **ENDS,
    ),
    "phi": PhiConfig(**{key: SIZE[key] for key in SIZE if key != "head_dim"}),
    "gemma2": Gemma2Config(**SIZE, sliding_window=8, query_pre_attn_scalar=8),
    "mistral-sliding": MistralConfig(**SIZE, sliding_window=8),
    "qwen2-sliding": Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "llama-dynamic": LlamaConfig(**SIZE, rope_parameters=DYNAMIC),
    "phi3-longrope": Phi3Config(**SIZE, rope_parameters=LONG, original_max_position_embeddings=64),
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=4, **ENDS),
    "mamba": MambaConfig(hidden_size=32, state_size=8, num_hidden_layers=2, **ENDS),
}  # fmt: skip
PROMPTS = ([5, 14, 9, 18], [7], [20, 30, 40, 12, 33, 8, 9])


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """Let torch use one thread."""


def model_of(config: Any, seed: int = 0) -> PreTrainedModel:
    """Return a model of random weights with confident predictions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and not name.endswith("A_log"):
                    parameter.normal_(0, 0.3)
                elif parameter.ndim == 1:  # biases and norms, too, differ from their defaults
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def ask(id: str, prompt: list[int], *, num: int = 40, **more: Any) -> GenRequest:
    sampling = Sampling(max_new_tokens=num, ignore_eos=True, **{"seed": 7, "temperature": 0.7, **more})
    return GenRequest(request_id=id, prompt_ids=prompt, n=2, sampling=sampling)


async def sampled(model: PreTrainedModel, requests: list[GenRequest]) -> list[list[Sample]]:
    """Have an engine answer requests that arrive together; it gets a copy of the model."""
    engine = TransformersEngine(
        copy.deepcopy(model), max_running=8, max_length=longest_text(model, None if named(model) else 96), stop_ids=[2],
        detokenize=TOKENIZER.decode,
    )  # fmt: skip
    await engine.start()
    try:
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    return [result.samples for result in results]


def named(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "max_position_embeddings")


def by_trainer(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]], temperature: float) -> torch.Tensor:
    """Return the log-probs of all completions, in order, as the trainer computes them, padded to one batch."""
    backend = LocalBackend(copy.deepcopy(model), TOKENIZER, OptimizerConfig(), keep_reference=False)
    columns = columns_of_rows(rows)
    columns.temperature_B[:] = temperature
    (microbatch,) = microbatches(columns, np.arange(len(rows)), 10_000)
    return backend.score(microbatch)[microbatch.source_M.argsort()]


@pytest.mark.parametrize("family", FAMILIES)
async def test_engine_trainer_and_model_agree_on_log_probs(family: str) -> None:
    model = model_of(FAMILIES[family])
    assert not supports(model)
    found = await sampled(model, [ask(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
    pairs = [(prompt, sample) for prompt, samples in zip(PROMPTS, found, strict=True) for sample in samples]
    theirs = torch.tensor([value for _, sample in pairs for value in sample.logprobs])
    assert len(theirs) == 6 * 40
    with torch.no_grad():
        expected = torch.cat([plain(model, prompt, sample) for prompt, sample in pairs])
    assert float((theirs - expected).abs().max()) < 1e-4
    trained = by_trainer(model, [(list(prompt), sample.token_ids) for prompt, sample in pairs], 0.7)
    assert float((theirs - trained).abs().max()) < 1e-4


def plain(model: PreTrainedModel, prompt: list[int], sample: Sample, temperature: float = 0.7) -> torch.Tensor:
    """Return the log-probs of a completion by a forward pass over the whole text, without a cache."""
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0].float() / temperature, -1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


async def test_a_completion_is_the_same_bit_for_bit_whatever_else_is_decoded() -> None:
    model, request = model_of(GPT2), ask("one", PROMPTS[0])
    ((alone, _),) = await sampled(model, [request])
    (beside, _), *_ = await sampled(model, [request, *(ask(str(i), p, seed=i) for i, p in enumerate(PROMPTS))])
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)


async def test_a_model_without_a_cache_is_computed_from_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = model_of(GPT2), set[int]()
    cached = await sampled(model, [ask("cached", PROMPTS[0])])
    monkeypatch.setattr(transformers, "_CACHE_NAMES", ())
    forward = type(model).forward

    def spy(self: Any, *args: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        widths.add(input_ids.shape[1])
        return forward(self, *args, input_ids=input_ids, **options)

    monkeypatch.setattr(type(model), "forward", spy)
    whole = await sampled(model, [ask("whole", PROMPTS[0])])
    assert widths == set(range(4, 44))
    assert [sample.token_ids for sample in whole[0]] == [sample.token_ids for sample in cached[0]]


async def test_a_cache_that_outlives_its_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the tests of updates can fail on this engine."""
    before, after = model_of(GPT2), model_of(GPT2, seed=1)

    async def crossing() -> float:
        engine = TransformersEngine(copy.deepcopy(before), max_running=2, stop_ids=[2], detokenize=TOKENIZER.decode)
        await engine.start()
        task = asyncio.create_task(engine.generate(ask("crossing", PROMPTS[0], num=80)))
        async with asyncio.timeout(60):
            while engine.generated_tokens < 20:
                await asyncio.sleep(0.001)
        await engine.begin_update(version=1, digest="d1", mode="swap")
        await engine.load_chunk({name: tensor.detach().clone() for name, tensor in after.named_parameters()})
        await engine.commit_update()
        sample = (await task).samples[0]
        await engine.close()
        first, second = sample.spans
        assert (first.version, second.version) == (0, 1)
        with torch.no_grad():
            expected = [plain(model, PROMPTS[0], sample) for model in (before, after)]
        theirs = torch.cat([expected[0][: first.end], expected[1][first.end :]])
        return float((theirs - torch.tensor(sample.logprobs)).abs().max())

    assert await crossing() < 1e-4
    monkeypatch.setattr(ModuleBatch, "drop_cache", lambda batch: None)
    assert await crossing() > 0.1


async def test_a_step_shows_progress_before_its_tokens_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is a forward pass of its own, so a step of many rows outlasts the lease of a ticket."""
    engine = TransformersEngine(model_of(GPT2), max_running=2, stop_ids=[2], detokenize=TOKENIZER.decode)
    held, go_on = threading.Event(), threading.Event()
    compute = ModuleBatch._next

    def second_waits(batch: ModuleBatch, row: int, completion: Completion) -> torch.Tensor:
        if row == 1 and not go_on.is_set():
            held.set()
            assert go_on.wait(60)
        return compute(batch, row, completion)

    monkeypatch.setattr(ModuleBatch, "_next", second_waits)
    await engine.start()
    task = asyncio.create_task(engine.generate(ask("slow", PROMPTS[0], num=2)))
    assert await asyncio.to_thread(held.wait, 60)
    assert (engine.generated_tokens, engine.progress) == (0, 1)
    go_on.set()
    await task
    await engine.close()
    assert engine.progress == 4


@pytest.mark.parametrize(
    ("family", "wanted", "found"),
    [
        ("gpt2", None, 96),
        ("gpt2", 50, 50),
        ("gpt2", 97, "rollout.max_length 97: this GPT2LMHeadModel takes 96 tokens"),
        ("llama-dynamic", 97, "takes 96 tokens"),
        ("phi3-longrope", None, 64),
        ("phi3-longrope", 65, "takes 64 tokens"),
        ("bloom", 4000, 4000),
        ("bloom", None, "rollout.max_length: set it, because this BloomForCausalLM names no longest text"),
    ],
)
def test_texts_are_no_longer_than_their_log_probs_are_exact(family: str, wanted: int | None, found: int | str) -> None:
    model = model_of(FAMILIES[family])
    if isinstance(found, int):
        assert longest_text(model, wanted) == found
        return
    with pytest.raises(ConfigError, match=found):
        longest_text(model, wanted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with a model and its tokenizer."""
    model_of(GPT2).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    return tmp_path


async def test_an_answer_keeps_to_its_form(folder: Path) -> None:
    tokenizer = build_tokenizer(ModelConfig(path=str(folder)))
    engine = open_engine(
        ModelConfig(path=str(folder)), tokenizer, max_running=4, seed=0, rollout=TransformersConfig(max_length=90)
    )
    assert (type(engine), engine.max_length) == (TransformersEngine, 90)
    await engine.start()
    form = Constraint(asked_by="response_format", json_schema=json.dumps({"enum": [123, "abc", True]}))
    sampling = Sampling(max_new_tokens=20, seed=3)
    request = GenRequest(request_id="a", prompt_ids=[5, 6], n=8, sampling=sampling, constraint=form)
    samples = (await engine.generate(request)).samples
    await engine.close()
    texts = {tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples}
    assert {sample.finish for sample in samples} == {"stop"}
    assert texts <= {"123", "true"}, "the tokenizer has no quotation mark"


def test_the_embedded_engine_names_this_one_as_the_way_out(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"not this GPT2LMHeadModel: rollout\.engine: transformers runs any"):
        open_engine(ModelConfig(path=str(folder)), TOKENIZER, max_running=4, seed=0)
