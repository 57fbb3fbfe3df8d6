"""AdamW against the textbook, its decay groups, its masters and its state."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.services.trainer.optimizer import Optimizer, decayed_names
from penstock.services.trainer.schedule import learning_rate
from penstock.shared.config.jobs.job import JobConfig, OptimizerConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.loading import build_model


def tiny(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).to(dtype)


def backward(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(ids).float().square().mean()
    loss.backward()
    optimizer.collect()


def test_matrices_are_decayed_norms_biases_and_embeddings_are_not(make_config: Callable[..., JobConfig]) -> None:
    config = make_config()
    names = decayed_names(build_model(config.model, 54, seed=0))
    assert all(name.endswith("_proj.weight") for name in names)
    assert len(names) == 7 * 2
    untied = make_config(model={"config": {**config.model.config.model_dump(), "tie_word_embeddings": False}})  # type: ignore[union-attr]
    assert "lm_head.weight" in decayed_names(build_model(untied.model, 54, seed=0))


def test_steps_follow_the_textbook() -> None:
    """Kingma and Ba's algorithm 1 with the decoupled decay of Loshchilov and Hutter, written out."""
    config = OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=0.01)
    model = tiny()
    optimizer = Optimizer(model, config)
    params = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(p) for n, p in params.items()}
    second = {n: torch.zeros_like(p) for n, p in params.items()}
    for step, rate in enumerate([0.1, 0.05, 0.02], start=1):
        backward(model, optimizer, seed=step)
        grads = {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
        assert optimizer.step(rate) == pytest.approx(norm, rel=1e-5)
        for name, param in params.items():
            grad = grads[name] * min(1.0, 0.01 / (norm + 1e-6))
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.9 * second[name] + 0.1 * grad.square()
            direction = first[name] / (1 - 0.8**step) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            decay = 0.1 if name == "1.weight" else 0.0
            params[name] = param - rate * (decay * param + direction)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach().double(), params[name], rtol=1e-5, atol=1e-6)


def test_only_a_fresh_optimizer_moves_weights_whatever_their_gradient() -> None:
    """Show why a job that started from another job's checkpoint got worse at once (docs/api.md), and what prevents it.

    The trained policy is in a flat region: gradients are 1e-4 of what they were. The moments still hold the steep
    ones, so that the next step is small; a fresh optimizer divides the gradient by its own magnitude.
    """
    peak, flat = 1e-3, 1e-4
    generator = torch.Generator().manual_seed(0)
    model, config = tiny(), OptimizerConfig(max_grad_norm=1e9, weight_decay=0.0)

    def moved(optimizer: Optimizer, scale: float, rate: float = peak) -> Tensor:
        """Step with random gradients of size ``scale``; return how far each weight moved, in units of the peak rate."""
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        for param in model.parameters():
            param.grad = scale * torch.randn(param.shape, generator=generator)
        optimizer.step(rate)
        return (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).abs() / peak

    trained = Optimizer(model, config)
    for scale in (*[1.0] * 200, *[flat] * 60):
        moved(trained, scale)
    policy, moments = {n: p.detach().clone() for n, p in model.named_parameters()}, trained.state()

    def first_step(rate: float, moments: dict[str, Tensor] | None = None) -> Tensor:
        model.load_state_dict(policy)
        optimizer = Optimizer(model, config)
        if moments is not None:
            optimizer.load_state(moments)
        return moved(optimizer, flat, rate)

    fresh = first_step(peak)
    torch.testing.assert_close(fresh, torch.ones_like(fresh), atol=0.02, rtol=0)
    begun = learning_rate(config.model_copy(update={"learning_rate": peak, "warmup_updates": 10}), 0, None)
    assert first_step(begun).max() < 0.11
    assert first_step(peak, moments).max() < 0.02


def test_a_step_without_gradient_still_decays_the_moments() -> None:
    model = tiny()
    optimizer = Optimizer(model, OptimizerConfig())
    backward(model, optimizer, seed=1)
    optimizer.step(1e-2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert optimizer.step(1e-2) == 0.0
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters() if n.startswith("1"))
    assert optimizer.state()["step.1.bias"].item() == 2


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = tiny()
    optimizer = Optimizer(model, OptimizerConfig())
    backward(model, optimizer, seed=1)
    optimizer.step(1e-2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()} | optimizer.state()
    backward(model, optimizer, seed=2)
    assert model[1].bias.grad is not None  # type: ignore[index, union-attr]
    model[1].bias.grad[0] = math.inf  # type: ignore[index, union-attr]
    assert not math.isfinite(optimizer.step(1e-2))
    after = {n: p.detach().clone() for n, p in model.named_parameters()} | optimizer.state()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_small_steps_of_narrow_parameters_add_up() -> None:
    """200 steps of 1e-5 move a bfloat16 weight near 1 by 2e-3, although each alone is below its resolution."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = Optimizer(model, OptimizerConfig())
    for _ in range(200):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.collect()
        optimizer.step(1e-5)
    assert optimizer.state()["master.weight"].item() == pytest.approx(1 - 2e-3, abs=1e-4)
    assert model.weight.item() == pytest.approx(1 - 2e-3, abs=2**-8)
    assert model.weight.item() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restores_the_next_step_exactly(dtype: torch.dtype) -> None:
    def run(steps: range, model: nn.Module, optimizer: Optimizer) -> None:
        for step in steps:
            backward(model, optimizer, seed=step)
            optimizer.step(1e-2)

    model = tiny(dtype)
    optimizer = Optimizer(model, OptimizerConfig())
    run(range(3), model, optimizer)
    weights, state = {n: p.detach().clone() for n, p in model.named_parameters()}, optimizer.state()
    run(range(3, 5), model, optimizer)

    again = tiny(dtype)
    restored = Optimizer(again, OptimizerConfig())
    again.load_state_dict(weights)
    restored.load_state(state)
    run(range(3, 5), again, restored)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_a_state_of_another_model_is_refused() -> None:
    optimizer = Optimizer(tiny(), OptimizerConfig())
    state = optimizer.state()
    with pytest.raises(CheckpointError, match=r"exp_avg\.1\.bias"):
        optimizer.load_state({**state, "exp_avg.1.bias": torch.zeros(9)})
    with pytest.raises(CheckpointError, match="1 names differ"):
        optimizer.load_state({name: t for name, t in state.items() if name != "step.1.bias"})


def wide() -> nn.Module:
    """Return a layer that is large enough for blocks of 8-bit moments."""
    torch.manual_seed(0)
    return nn.Linear(128, 64)


def descend(model: nn.Module, optimizer: Optimizer, steps: int) -> float:
    """Train ``model`` towards a constant output; return the loss before the last step."""
    inputs = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    value = 0.0
    for _ in range(steps):
        loss = (model(inputs) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(1e-2)
        value = float(loss.detach())
    return value


@pytest.mark.filterwarnings("ignore")
def test_moments_of_8_bits_learn_alike_and_continue_from_their_state() -> None:
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    config = OptimizerConfig(type="adamw_8bit")
    model, exact = wide(), wide()
    optimizer = Optimizer(model, config)
    assert descend(model, optimizer, 30) == pytest.approx(
        descend(exact, Optimizer(exact, OptimizerConfig()), 30), rel=0.2
    )
    weights, state = {n: p.detach().clone() for n, p in model.named_parameters()}, optimizer.state()
    assert state["state1.weight"].dtype == torch.uint8
    assert state["step.weight"].item() == 30
    descend(model, optimizer, 2)

    again = wide()
    restored = Optimizer(again, config)
    again.load_state_dict(weights)
    restored.load_state(state)
    descend(again, restored, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="does not fit"):
        Optimizer(wide(), OptimizerConfig()).load_state(state)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs bitsandbytes"):
        Optimizer(wide(), OptimizerConfig(type="adamw_8bit"))
