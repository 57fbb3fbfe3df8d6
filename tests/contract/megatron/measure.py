"""Program of each rank of the megatron contract: runs the backend beside `local`, and measures the differences.

`measure_all` runs on ranks; rank 0 writes the exported model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import Backend, Role, Scores
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.backends.megatron import scoring
from penstock.services.trainer.backends.megatron.backend import MegatronBackend
from penstock.services.trainer.backends.megatron.groups import open_groups
from penstock.services.trainer.batch.packing import Microbatch, columns_of_rows, microbatches
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.update_rules.on_policy import balance
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.critic import critic_of
from penstock.shared.models.loading import build_model, build_tokenizer

STEPS = 5
LAYERS, EXPERTS = 2, 4
LEARNING_RATE = 1e-3
# A large epsilon: Adam's first steps divide by the gradient's own size, which would magnify rounding a millionfold.
OPTIMIZER = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5, eps=1e-3)

MOE = {"aux_loss_coef": 0.5}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Role]] = {
    "tensor": ("qwen3", {"max_logits": 150}, {"tensor_parallel": 2, "activation_checkpointing": True}, "policy"),
    "sequence": ("qwen3", {}, {"tensor_parallel": 2, "sequence_parallel": True}, "policy"),
    "biases": ("qwen2", {"tied": False}, {"tensor_parallel": 2}, "policy"),
    "experts": (
        "qwen3_moe", MOE, {"tensor_parallel": 2, "sequence_parallel": True, "activation_checkpointing": True}, "policy",
    ),
    "critic": ("qwen3", {}, {"tensor_parallel": 2, "sequence_parallel": True}, "critic"),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}, {"tensor_parallel": 2}, "policy"),
    "context": ("qwen3", {"tied": False}, {"context_parallel": 2}, "policy"),
    "data": ("llama", {"tied": False}, {}, "policy"),
    "stages": (
        "qwen3", {"go_on_with": {"tensor_parallel": 2}}, {"pipeline_parallel": 2, "activation_checkpointing": True},
        "policy",
    ),
    "stages with experts": (
        "qwen3_moe", {**MOE, "tied": False, "replay": True}, {"pipeline_parallel": 2, "activation_checkpointing": True},
        "policy",
    ),
    "critic in stages": ("qwen3", {}, {"pipeline_parallel": 2}, "critic"),
    "bfloat16 in stages": ("qwen3", {"dtype": "bfloat16"}, {"pipeline_parallel": 2}, "policy"),
    "experts dealt": (
        "qwen3_moe", {**MOE, "ranks": 4},
        {"expert_parallel": 2, "pipeline_parallel": 2, "activation_checkpointing": True}, "policy",
    ),
    "replayed": ("qwen3_moe", {**MOE, "replay": True}, {"context_parallel": 2, "expert_parallel": 2}, "policy"),
}  # fmt: skip
"""Cases by name: architecture, options of the test, cut of the model over ranks, role.

Options: `ranks`, the number of ranks, if not two; `go_on_with`, the cut that loads the state, else `local`;
`max_logits`, the number of logits computed at once.
"""


def model_config(arch: str, *, tied: bool = True, dtype: str = "float32", **_: Any) -> ModelConfig:
    architecture = {
        "arch": arch, "hidden_size": 32, "intermediate_size": 48, "num_layers": LAYERS, "num_heads": 4,
        "num_kv_heads": 2, "vocab_size": 55, "tie_word_embeddings": tied,
        "experts": {"number": EXPERTS, "per_token": 2} if arch == "qwen3_moe" else None,
    }  # fmt: skip
    return ModelConfig(config=ArchitectureConfig(**architecture), tokenizer="char", dtype=dtype)


def noisy_model(config: ModelConfig, role: Role) -> PreTrainedModel:
    """Return a model without weights of 0 or 1, also in biases and norms."""
    model = build_model(config, 54, seed=1)
    model = critic_of(model) if role == "critic" else model
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=noise).mul(0.1).to(param.dtype))
    return model


def ragged_microbatches(*, replay: bool) -> list[Microbatch]:
    """Return three microbatches, so that one data-parallel rank runs out; with ``replay`` they have router tables."""
    draw = np.random.default_rng(3)
    rows = [
        (draw.integers(0, 54, draw.integers(1, 9)).tolist(), draw.integers(0, 54, draw.integers(1, 12)).tolist())
        for _ in range(13)
    ]
    temperatures = np.array([0.7, 1.0, 1.3], np.float32)[np.arange(len(rows)) % 3]
    columns = replace(columns_of_rows(rows), temperature_B=temperatures)
    parts = [microbatches(columns, part, 1000) for part in np.array_split(np.arange(len(rows)), 3)]
    if not replay:
        return [microbatch for (microbatch,) in parts]
    tables = [draw.random((part.tokens.num_tokens, LAYERS, EXPERTS)).argsort(-1)[..., :2] for (part,) in parts]
    return [replace(part, experts_TNK=torch.from_numpy(table)) for (part,), table in zip(parts, tables, strict=True)]


class Loss:
    """Policy gradient with fixed weights, entropy bonus and exact KL; records entropy and KL of each token."""

    def __init__(self) -> None:
        self.total = 0.0
        self.seen: list[Tensor] = []

    def __call__(self, scores: Scores) -> Tensor:
        weights_M = torch.linspace(-1, 1, len(scores.values_M))
        value = (weights_M * scores.values_M).sum() / 40
        if scores.entropy_M is not None and scores.kl_M is not None:
            value = value - 0.05 * scores.entropy_M.sum() / 40 + 0.3 * scores.kl_M.sum() / 40
            self.seen.append(torch.stack([scores.entropy_M.detach(), scores.kl_M.detach()]))
        self.total += float(value.detach())
        return value


def train(
    backend: Backend, mine: Iterable[Microbatch | None], role: Role, steps: int, collective: Collective
) -> tuple[list[Loss], list[float]]:
    losses, norms, mine = [], [], list(mine)
    for _ in range(steps):
        loss = Loss()
        balance(backend, mine, collective)
        for microbatch in mine:
            exact = role == "policy"
            backend.accumulate(microbatch, loss, entropy=exact, kl=exact)
        norms.append(backend.step(LEARNING_RATE))
        losses.append(loss)
    return losses, norms


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max(float((tensor.float() - theirs[name].float()).abs().max()) for name, tensor in ours.items())


def weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def measure(world: World, name: str, directory: Path) -> dict[str, float]:
    arch, options, parallel, role = CASES[name]
    coef, replay = options.get("aux_loss_coef", 0.0), options.get("replay", False)
    config = model_config(arch, **options)
    tokenizer, model = build_tokenizer(config), noisy_model(config, role)
    cut = MegatronConfig(type="megatron", **parallel)
    policy = role == "policy"

    def local_backend() -> LocalBackend:
        return LocalBackend(
            copy.deepcopy(model), tokenizer, OPTIMIZER, keep_reference=policy, role=role, aux_loss_coef=coef
        )

    def megatron_backend(cut: MegatronConfig) -> MegatronBackend:
        return MegatronBackend(model, tokenizer, OPTIMIZER, cut, keep_reference=policy, role=role, aux_loss_coef=coef)

    local, megatron = local_backend(), megatron_backend(cut)
    everything, copies = ragged_microbatches(replay=replay), world.data_parallel(cut.model_parallel)
    mine: list[Microbatch | None] = [*everything[copies.rank :: copies.size]]
    mine += [None] * (-(-len(everything) // copies.size) - len(mine))

    initial = weights(local)
    found = {"initial bits": apart(weights(megatron), initial)}
    found["scores"] = max(float((megatron.score(m) - local.score(m)).abs().max()) for m in everything)
    ours, our_norms = train(megatron, mine, role, STEPS, copies)
    theirs, their_norms = train(local, everything, role, STEPS, Alone())
    totals = torch.tensor([loss.total for loss in ours])
    if copies.size > 1:
        dist.all_reduce(totals, group=copies.handle)
    found["loss"] = float((totals - torch.tensor([loss.total for loss in theirs])).abs().max())
    if policy and copies.size == 1:
        pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.seen, b.seen, strict=True)]
        found["entropy and kl"] = max(float((a - b).abs().max()) for a, b in pairs)
        found["largest kl"] = max(float(seen[1].max()) for loss in theirs for seen in loss.seen)
    if megatron.routers is not None and local.routers is not None:
        facts, expected = megatron.routers.report(copies), local.routers.report(Alone())
        found["router facts"] = max(abs(facts[key] - value) for key, value in expected.items())
    found["norm"] = max(abs(a / b - 1) for a, b in zip(our_norms, their_norms, strict=True))
    found["weights"] = apart(weights(megatron), weights(local))
    found["moved"] = apart(weights(local), initial)
    if policy:
        first = everything[0]
        ours_M, theirs_M = (backend.reference_logprobs(first) for backend in (megatron, local))
        found["reference"] = float((ours_M - theirs_M).abs().max())
    state, local_state = megatron.state(), local.state()
    found["moments"] = apart(state.optimizer, local_state.optimizer)

    going_on = options.get("go_on_with")
    resumed = local_backend() if going_on is None else megatron_backend(MegatronConfig(**going_on))
    other = megatron_backend(cut)
    resumed.load_state(state)
    other.load_state(local_state)
    found["loaded bits"] = max(apart(weights(other), weights(local)), apart(weights(resumed), weights(megatron)))
    found["state bits"] = max(
        apart(copied, original)
        for ours, theirs in ((other.state(), local_state), (resumed.state(), state))
        for copied, original in ((ours.optimizer, theirs.optimizer), (ours.reference, theirs.reference))
        if original
    )
    train(local, everything, role, 1, Alone())
    train(other, mine, role, 1, copies)
    found["resumed"] = apart(weights(other), weights(local))
    if name == "tensor" and dist.get_rank() == 0:
        (directory / "export").mkdir()
    if name == "tensor":
        export(megatron, directory / "export")
    return found


def export(backend: MegatronBackend, directory: Path) -> None:
    tensors, files = {name: tensor.contiguous() for name, tensor in weights(backend).items()}, backend.state().files
    ids = [list(range(5, 25)), list(range(30, 45))]
    (microbatch,) = microbatches(columns_of_rows([(row[:4], row[4:]) for row in ids]), np.arange(2), 1000)
    scores = backend.score(microbatch)
    if dist.get_rank() == 0:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        save_file(
            {"logprobs": scores, "select": microbatch.select_M, "ids": microbatch.tokens.token_ids_T},
            directory / "scores",
        )
        for name, data in files.items():
            (directory / name).write_bytes(data)


def vocabulary_gradient() -> dict[str, float]:
    """Compare the log-softmax over two ranks' columns with the whole one, in float64.

    Return the largest differences of values and gradient.
    """
    noise = torch.Generator().manual_seed(4)
    whole = torch.randn(7, 10, generator=noise, dtype=torch.float64).mul(5).requires_grad_()
    weight = torch.randn(7, 10, generator=noise, dtype=torch.float64)
    columns = slice(dist.get_rank() * 5, dist.get_rank() * 5 + 5)
    own = whole.detach()[:, columns].clone().requires_grad_()
    expected, found = torch.log_softmax(whole, -1), scoring.vocab_parallel_log_softmax(own, dist.group.WORLD)
    for log_probs, part in ((expected, weight), (found, weight[:, columns])):
        (log_probs * part + log_probs.exp() * log_probs).sum().backward()
    assert own.grad is not None and whole.grad is not None
    return {
        "values": float((expected[:, columns] - found).detach().abs().max()),
        "gradient": float((whole.grad[:, columns] - own.grad).abs().max()),
    }


def check_refusals() -> None:
    """Check that cuts which do not divide the ranks are refused."""
    for cut, message in (
        ({"pipeline_parallel": 4}, "2 trainer ranks cannot be divided by .* = 1 x 1 x 4"),
        ({"expert_parallel": 4}, "expert_parallel 4 does not divide the 2 context- and data-parallel ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_groups(MegatronConfig(**cut))


def measure_all(world: World, directory: Path) -> dict[str, dict[str, float]]:
    """Measure on this rank all cases of the present number of ranks; return quantities by case."""
    found, limit = {}, scoring.MAX_LOGITS
    for name, (_, options, _, _) in CASES.items():
        if options.get("ranks", 2) == world.place.size:
            scoring.MAX_LOGITS = options.get("max_logits", limit)
            found[name] = measure(world, name, directory)
    if world.place.size == 2:
        check_refusals()
        found["log_softmax"] = vocabulary_gradient()
    return found
