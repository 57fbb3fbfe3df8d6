"""What every trainer backend must do. A new backend joins by one entry in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.backends.base import Backend
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.packing import Microbatch, columns_of_rows, microbatches
from penstock.shared.config.job import OptimizerConfig
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.loading import build_model, build_tokenizer

ROWS = [([5, 6, 7], [8, 9, 2]), ([10], [11, 2]), ([12, 13, 14, 15], [16])]
MODEL = ModelConfig(
    config=ArchitectureConfig(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2), tokenizer="char"
)
Open = Callable[[], Backend]


def local(device: str) -> Backend:
    tokenizer = build_tokenizer(MODEL)
    model = build_model(MODEL, len(tokenizer), seed=5)
    return LocalBackend(model, tokenizer, OptimizerConfig(max_grad_norm=1e9), keep_reference=True, device=device)


BACKENDS = {"local": lambda: local("cpu"), "local-cuda": lambda: local("cuda")}


@pytest.fixture(params=["local", pytest.param("local-cuda", marks=pytest.mark.gpu)])
def open_backend(request: pytest.FixtureRequest) -> Open:
    if request.param == "local-cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return BACKENDS[request.param]


def packed(rows: list[tuple[list[int], list[int]]]) -> Microbatch:
    (microbatch,) = microbatches(columns_of_rows(rows), np.arange(len(rows)), 1000)
    return microbatch


def nll(logprobs_M: Tensor, entropy_M: Tensor | None) -> Tensor:
    return -logprobs_M.sum()


def weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.weights()}


def test_gradients_add_up_until_the_step(open_backend: Open) -> None:
    whole, cut = open_backend(), open_backend()
    whole.accumulate(packed(ROWS), nll, temperature=1.0, entropy=False)
    for row in ROWS:
        cut.accumulate(packed([row]), nll, temperature=1.0, entropy=False)
    norm = whole.step(1e-3)
    assert norm > 0
    assert cut.step(1e-3) == pytest.approx(norm, rel=1e-4)
    assert whole.step(1e-3) == 0, "a step uses the gradients up"


def test_log_probs_and_entropy_are_those_of_the_scaled_logits(open_backend: Open) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(logprobs_M: Tensor, entropy_M: Tensor | None) -> Tensor:
        assert entropy_M is not None
        seen.append((logprobs_M.detach().cpu(), entropy_M.detach().cpu()))
        return logprobs_M.sum()

    microbatch = packed([ROWS[0]])
    open_backend().accumulate(microbatch, keep, temperature=0.5, entropy=True)
    model = build_model(MODEL, 54, seed=5)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:] / 0.5
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(seen[0][0], expected.log_prob(torch.tensor([8, 9, 2])), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen[0][1], expected.entropy(), atol=1e-4, rtol=0)


def test_the_reference_stays_until_it_is_frozen_again(open_backend: Open) -> None:
    backend, microbatch = open_backend(), packed(ROWS)
    before = backend.reference_logprobs(microbatch, temperature=1.0)
    assert not before.requires_grad
    backend.accumulate(microbatch, nll, temperature=1.0, entropy=False)
    backend.step(1e-2)
    assert torch.equal(backend.reference_logprobs(microbatch, temperature=1.0), before)
    backend.freeze_reference()
    assert not torch.equal(backend.reference_logprobs(microbatch, temperature=1.0), before)


def test_weights_have_a_fixed_order_and_no_duplicates(open_backend: Open) -> None:
    names = [name for name, _ in open_backend().weights()]
    assert names == [name for name, _ in open_backend().weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names, "tied to the embedding"


def test_state_is_a_copy_that_restores_everything(open_backend: Open) -> None:
    backend, microbatch = open_backend(), packed(ROWS)
    backend.accumulate(microbatch, nll, temperature=1.0, entropy=False)
    backend.step(1e-2)
    state = backend.state()

    def one_more(b: Backend) -> dict[str, Tensor]:
        b.accumulate(microbatch, nll, temperature=1.0, entropy=False)
        b.step(1e-2)
        return weights(b)

    expected = one_more(backend)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in state.weights.items())
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
    backend.accumulate(packed(ROWS), nll, temperature=1.0, entropy=False)
    backend.step(1e-3)
    seconds = backend.take_seconds()
    assert min(seconds.forward, seconds.backward, seconds.optimizer) > 0
    again = backend.take_seconds()
    assert (again.forward, again.backward, again.optimizer) == (0, 0, 0)
