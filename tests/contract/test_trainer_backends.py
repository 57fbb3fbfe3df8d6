"""Contract of every trainer backend. Add a new backend as an entry of ``BACKENDS``."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.rollout.engines import EmbeddedEngine
from penstock.services.trainer.backends.base import Backend, Role, Scores
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.batch.packing import Microbatch, columns_of_rows, microbatches
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.critic import critic_of
from penstock.shared.models.decoder import hidden_states
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.models.lora import add_adapter
from penstock.shared.models.packed import pack
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling

ROWS = [([5, 6, 7], [8, 9, 2]), ([10], [11, 2]), ([12, 13, 14, 15], [16])]
MODEL = ModelConfig(
    config=ArchitectureConfig(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2), tokenizer="char"
)
Open = Callable[..., Backend]


def local(device: str, lora: LoraConfig | None = None, role: Role = "policy") -> Backend:
    tokenizer = build_tokenizer(MODEL)
    model = build_model(MODEL, len(tokenizer), seed=5)
    if role == "critic":
        model, lora = critic_of(model), None
    if lora is not None:
        add_adapter(model, lora, seed=5)
    config = OptimizerConfig(max_grad_norm=1e9)
    return LocalBackend(model, tokenizer, config, keep_reference=role == "policy", device=device, role=role, lora=lora)


BACKENDS = {
    "local": partial(local, "cpu"),
    "local-lora": partial(local, "cpu", LoraConfig(rank=4)),
    "local-cuda": partial(local, "cuda"),
}


@pytest.fixture(params=["local", "local-lora", pytest.param("local-cuda", marks=pytest.mark.gpu)])
def open_backend(request: pytest.FixtureRequest) -> Open:
    return BACKENDS[request.param]


def packed(rows: list[tuple[list[int], list[int]]], *, temperatures: Sequence[float] = ()) -> Microbatch:
    columns = columns_of_rows(rows)
    if temperatures:
        columns = replace(columns, temperature_B=np.array(temperatures, np.float32))
    (microbatch,) = microbatches(columns, np.arange(len(rows)), 1000)
    return microbatch


def nll(scores: Scores) -> Tensor:
    return -scores.values_M.sum()


def weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.weights()}


def test_gradients_add_up_until_the_step(open_backend: Open) -> None:
    whole, cut = open_backend(), open_backend()
    whole.accumulate(packed(ROWS), nll, entropy=False)
    for row in ROWS:
        cut.accumulate(packed([row]), nll, entropy=False)
    norm = whole.step(1e-3)
    assert norm > 0
    assert cut.step(1e-3) == pytest.approx(norm, rel=1e-4)
    assert whole.step(1e-3) == 0, "a step uses the gradients up"


def categorical(model: torch.nn.Module, row: tuple[list[int], list[int]], temperature: float) -> Categorical:
    """Return the model's distribution at each token of an answer."""
    prompt, answer = row
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return Categorical(logits=logits / temperature)


def test_each_row_is_scored_at_its_own_temperature(open_backend: Open) -> None:
    seen: list[Scores] = []

    def keep(scores: Scores) -> Tensor:
        seen.append(scores)
        return scores.values_M.sum()

    backend, model = open_backend(), build_model(MODEL, 54, seed=5)
    for temperatures in ((0.5, 0.5, 0.5), (0.5, 1.0, 1.7)):
        microbatch = packed(ROWS, temperatures=temperatures)
        backend.accumulate(microbatch, keep, entropy=True)
        backend.step(0.0)
        assert seen[-1].entropy_M is not None
        found = [seen[-1].values_M.detach(), backend.score(microbatch), backend.reference_logprobs(microbatch)]
        for row, temperature in enumerate(temperatures):
            own, expected = (microbatch.rows_M == row).numpy(), categorical(model, ROWS[row], temperature)
            assert microbatch.targets_M[own].tolist() == ROWS[row][1]
            logprobs = expected.log_prob(torch.tensor(ROWS[row][1]))
            for logprobs_M in found:
                torch.testing.assert_close(logprobs_M.cpu()[own], logprobs, atol=1e-4, rtol=0)
            entropy_M = seen[-1].entropy_M.detach().cpu()
            torch.testing.assert_close(entropy_M[own], expected.entropy(), atol=1e-4, rtol=0)


def test_scores_without_gradient_are_those_of_the_loss(open_backend: Open) -> None:
    seen: list[Tensor] = []

    def keep(scores: Scores) -> Tensor:
        seen.append(scores.values_M.detach().cpu())
        return scores.values_M.sum()

    for role in ("policy", "critic"):
        backend = open_backend(role=role)
        scored = backend.score(packed(ROWS, temperatures=(0.5, 1.0, 0.7)))
        backend.accumulate(packed(ROWS, temperatures=(0.5, 1.0, 0.7)), keep)
        backend.step(0.0)
        torch.testing.assert_close(scored.cpu(), seen[-1], atol=1e-6, rtol=0)
        assert not scored.requires_grad


def test_a_rank_without_a_microbatch_takes_part_and_adds_nothing(open_backend: Open) -> None:
    backend = open_backend()
    assert len(backend.score(None)) == 0
    assert len(backend.reference_logprobs(None)) == 0
    backend.accumulate(None, nll)
    assert backend.step(1e-3) == 0


def test_exact_kl_to_the_reference(open_backend: Open) -> None:
    """The KL is 0 without gradient at the reference; after a step it is the exact sum over the vocabulary."""
    seen: list[Tensor] = []

    def keep(scores: Scores) -> Tensor:
        assert scores.kl_M is not None
        seen.append(scores.kl_M.detach().cpu())
        return scores.kl_M.sum()

    backend, microbatch = open_backend(), packed(ROWS, temperatures=(0.5, 1.0, 0.7))
    backend.accumulate(microbatch, keep, kl=True)
    assert backend.step(1e-3) < 1e-5
    assert seen[0].abs().max() < 1e-6
    backend.accumulate(microbatch, nll)
    backend.step(1e-2)
    backend.accumulate(microbatch, keep, kl=True)
    backend.step(0.0)
    models = [build_model(MODEL, 54, seed=5) for _ in range(2)]
    models[0].load_state_dict(weights(backend), strict=False)
    for row, temperature in enumerate((0.5, 1.0, 0.7)):
        ours, theirs = (categorical(model, ROWS[row], temperature) for model in models)
        found = seen[1][(microbatch.rows_M == row).numpy()]
        torch.testing.assert_close(found, torch.distributions.kl_divergence(ours, theirs), atol=1e-4, rtol=1e-3)


def test_a_critic_begins_at_zero_and_learns(open_backend: Open) -> None:
    def error(scores: Scores) -> Tensor:
        return (scores.values_M - 1).square().sum()

    critic, microbatch = open_backend(role="critic"), packed(ROWS)
    assert not critic.score(microbatch).any()
    for _ in range(30):
        critic.accumulate(microbatch, error)
        critic.step(1e-2)
    assert (critic.score(microbatch) - 1).abs().max() < 0.2
    names = [name for name, _, _ in critic.layout()]
    assert "score.weight" in names
    assert [(name, tuple(tensor.shape)) for name, tensor in critic.weights()] == [
        (name, shape) for name, shape, _ in critic.layout()
    ]


def test_weights_of_another_model_are_loaded_by_name(open_backend: Open) -> None:
    policy, critic = open_backend(), open_backend(role="critic")
    policy.accumulate(packed(ROWS), nll)
    policy.step(1e-2)
    names = {name for name, _, _ in critic.layout()}
    critic.load_weights((name, tensor) for name, tensor in policy.weights() if name in names)
    expected, loaded = weights(policy), weights(critic)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items() if name != "score.weight")
    with pytest.raises(CheckpointError, match="'nothing'"):
        critic.load_weights([("nothing", torch.zeros(1))])


def test_the_reference_stays_until_it_is_frozen_again(open_backend: Open) -> None:
    backend, microbatch = open_backend(), packed(ROWS)
    before = backend.reference_logprobs(microbatch)
    assert not before.requires_grad
    backend.accumulate(microbatch, nll, entropy=False)
    backend.step(1e-2)
    assert torch.equal(backend.reference_logprobs(microbatch), before)
    backend.freeze_reference()
    assert not torch.equal(backend.reference_logprobs(microbatch), before)


def test_weights_have_a_fixed_order_and_no_duplicates(open_backend: Open) -> None:
    names = [name for name, _ in open_backend().weights()]
    assert names == [name for name, _ in open_backend().weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names, "tied to the embedding"


def test_what_is_exported_loads_anywhere_and_engines_serve_it(open_backend: Open) -> None:
    backend = open_backend()
    backend.accumulate(packed(ROWS), nll, entropy=False)
    backend.step(1e-2)
    exported, files = weights(backend), backend.state().files
    if "adapter_config.json" in files:  # served over its model: see tests/contract/engines/test_engine_adapters.py
        return
    with tempfile.TemporaryDirectory() as directory:
        save_file(exported, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        for name, data in files.items():
            (Path(directory) / name).write_bytes(data)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert tokenizer.chat_template
    assert tokenizer.decode(tokenizer("1+2").input_ids) == "1+2"
    torch.testing.assert_close(model.get_input_embeddings().weight.detach(), exported["model.embed_tokens.weight"])
    sample = asyncio.run(served(model, tokenizer, [5, 6, 7]))
    row = [5, 6, 7], list(sample.token_ids)
    assert len(row[1]) == 20
    torch.testing.assert_close(backend.score(packed([row])).cpu(), torch.tensor(sample.logprobs), atol=1e-4, rtol=0)


async def served(model: Any, tokenizer: Any, prompt: list[int]) -> Sample:
    engine = EmbeddedEngine(model, max_running=1, stop_ids=[2], detokenize=tokenizer.decode)
    await engine.start()
    try:
        sampling = Sampling(max_new_tokens=20, ignore_eos=True, seed=1)
        found = await engine.generate(GenRequest(request_id="a", prompt_ids=prompt, n=1, sampling=sampling))
    finally:
        await engine.close()
    return found.samples[0]


def test_state_is_a_copy_that_restores_everything(open_backend: Open) -> None:
    backend, microbatch = open_backend(), packed(ROWS)
    backend.accumulate(microbatch, nll, entropy=False)
    backend.step(1e-2)
    state = backend.state()

    def one_more(b: Backend) -> dict[str, Tensor]:
        b.accumulate(microbatch, nll, entropy=False)
        b.step(1e-2)
        return weights(b)

    expected = one_more(backend)
    saved = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.weights.items()
    }
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in saved.items())
    other = open_backend()
    other.load_state(state)
    for name, tensor in one_more(other).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_a_state_that_does_not_fit_changes_nothing(open_backend: Open) -> None:
    backend = open_backend()
    state, before = backend.state(), weights(backend)
    name = next(iter(state.weights))
    moved = {n: t + 1 for n, t in state.weights.items()}
    for bad in (
        replace(state, weights={**moved, name: torch.zeros(3)}),
        replace(state, weights=moved, optimizer={}),
        replace(state, weights=moved, reference={}),
    ):
        with pytest.raises(CheckpointError, match="does not fit"):
            backend.load_state(bad)
        assert all(torch.equal(before[n], t) for n, t in weights(backend).items())


def test_time_is_counted_once(open_backend: Open) -> None:
    backend = open_backend()
    backend.accumulate(packed(ROWS), nll, entropy=False)
    backend.step(1e-3)
    seconds = backend.take_seconds()
    assert min(seconds.forward, seconds.backward, seconds.optimizer) > 0
    again = backend.take_seconds()
    assert (again.forward, again.backward, again.optimizer) == (0, 0, 0)


@pytest.mark.parametrize("wide", [False, True])
def test_logits_of_a_float32_head_keep_their_digits_in_trainer_and_engine(wide: bool) -> None:
    """In bfloat16, a logit near 30 is a multiple of 1/8, and log-probs would be off by as much."""
    config = MODEL.model_copy(update={"dtype": "bfloat16", "fp32_head": wide})
    tokenizer = build_tokenizer(config)
    model = build_model(config, len(tokenizer), seed=5)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    backend = LocalBackend(
        model, tokenizer, OptimizerConfig(), keep_reference=False, device="cpu", role="policy", lora=None
    )
    sample = asyncio.run(served(build_like(model, config), tokenizer, [5, 6, 7]))
    row = [5, 6, 7], list(sample.token_ids)
    with torch.no_grad():
        hidden_TD = hidden_states(model, pack([[*row[0], *row[1]]])).double()[2:-1]
        exact_TV = torch.log_softmax(hidden_TD @ model.get_output_embeddings().weight.double().T, -1)
    exact = exact_TV.gather(-1, torch.tensor(row[1])[:, None])[:, 0]
    trained = backend.score(packed([row])).double()
    off = [float((found - exact).abs().max()) for found in (trained, torch.tensor(sample.logprobs).double())]
    assert max(off) < 1e-4 if wide else min(off) > 1e-3, off
    assert backend.state().weights["model.embed_tokens.weight"].dtype == torch.bfloat16


def build_like(model: Any, config: ModelConfig) -> Any:
    copy = build_model(config, 54, seed=0)
    copy.load_state_dict(model.state_dict())
    return copy
