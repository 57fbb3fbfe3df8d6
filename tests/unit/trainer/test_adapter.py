"""Training of an adapter: what changes and what stays, checkpoints with and without the base weights, export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.trainer.checkpoint.export import export
from penstock.services.trainer.checkpoint.state import load_checkpoint, save_checkpoint
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.data.prompts import Demonstration
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.protocol.trajectory import Group

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
ARCHITECTURE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "max_position_embeddings": 64}
IDS = torch.tensor([[5, 9, 3, 17, 4]])
Job = Callable[..., JobConfig]


@pytest.fixture
def lora(make_config: Callable[..., JobConfig]) -> Job:
    """Return a function that builds a job with an adapter on random weights."""

    def make(*, model: dict[str, Any] | None = None, lora: dict[str, Any] | None = None, **sections: Any) -> JobConfig:
        chosen = model or {"config": ARCHITECTURE}
        return make_config(model={"config": None, **chosen, "lora": {"rank": 4, **(lora or {})}}, **sections)

    return make


@pytest.fixture
def on_disk(lora: Job, tmp_path: Path) -> Job:
    """Return a function that builds a job with an adapter on a model directory."""
    config = ModelConfig(config=ARCHITECTURE, tokenizer="char")
    tokenizer = build_tokenizer(config)
    build_model(config, len(tokenizer), seed=1).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return lambda **sections: lora(model={"path": str(tmp_path / "base"), "tokenizer": None}, **sections)


def update(learner: Learner, groups: Sequence[Group], index: int = 0) -> dict[str, float]:
    return learner.update(BatchShard.whole(groups), update_index=index)


def copies(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def whole(learner: Learner) -> dict[str, Tensor]:
    return copies(learner._policy.weights())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits[0]


def test_an_update_changes_the_adapter_and_nothing_else(lora: Job, batch: list[Group]) -> None:
    learner = Learner(lora())
    base, adapter, merged = copies(learner.frozen()), copies(learner.weights()), whole(learner)
    assert all(torch.equal(base[name], merged[name]) for name in base), "a new adapter adds nothing"
    metrics = update(learner, batch)
    assert metrics["optimizer/grad_norm"] > 0
    assert all(torch.equal(base[name], tensor) for name, tensor in learner.frozen())
    assert any(not torch.equal(adapter[name], tensor) for name, tensor in learner.weights())
    moved = {name for name, tensor in whole(learner).items() if not torch.equal(base[name], tensor)}
    assert moved
    assert all("_proj.weight" in name for name in moved)


def test_the_optimizer_knows_the_adapter_only(lora: Job) -> None:
    state = Learner(lora()).state().models["policy"]
    assert all(".lora_" in name for name in state.optimizer)
    assert set(state.reference) == set()


def test_the_reference_is_the_base_and_can_be_moved_to_the_policy(lora: Job, batch: list[Group]) -> None:
    learner = Learner(lora(algorithm={"kl": {"coef": 0.1}}))
    assert update(learner, batch)["policy/kl_ref"] == 0
    assert update(learner, batch, 1)["policy/kl_ref"] > 0
    state = learner.state().models["policy"]
    assert set(state.reference) == set(state.adapter), "no second copy of the base"
    learner._policy.freeze_reference()
    assert update(learner, batch, 2)["policy/kl_ref"] == 0


def test_a_warm_start_trains_the_base_before_the_adapter(lora: Job, batch: list[Group]) -> None:
    learner = Learner(lora(warm_start={"steps": 2}, algorithm={"kl": {"coef": 0.1}}))
    before = copies(learner.frozen())
    learner.warm_start([[Demonstration([5, 6], [7, 2], [1, 1])]] * 2)
    warm = copies(learner.frozen())
    assert any(not torch.equal(before[name], warm[name]) for name in warm)
    merged = whole(learner)
    assert all(torch.equal(warm[name], merged[name]) for name in warm), "the adapter is untrained"
    assert update(learner, batch)["policy/kl_ref"] == 0, "the reference is the warm policy"
    assert all(torch.equal(warm[name], tensor) for name, tensor in learner.frozen())


def test_adapters_or_merged_weights_are_published(lora: Job, batch: list[Group]) -> None:
    adapters, merged = Learner(lora()), Learner(lora(lora={"publish": "merged"}))
    for learner in (adapters, merged):
        update(learner, batch)
        names = [spec.name for spec in learner.layout().tensors]
        assert names == [name for name, _ in learner.weights()]
    assert all(".lora_" in name for name, _ in adapters.weights())
    assert not list(merged.frozen())
    expected, found = whole(adapters), copies(merged.weights())
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("kind", ["random", "warm", "path"])
def test_save_load_continue_equals_uninterrupted(
    kind: str, lora: Job, on_disk: Job, make_group: Callable[..., Group], tmp_path: Path
) -> None:
    batches = [[make_group(4 * step + i, seed=step) for i in range(4)] for step in range(4)]
    sections: dict[str, Any] = {"algorithm": {"kl": {"coef": 0.1}}, "warm_start": {"steps": 2 * (kind == "warm")}}
    config = on_disk(**sections) if kind == "path" else lora(**sections)
    learner = Learner(config)
    if kind == "warm":
        learner.warm_start([[Demonstration([5, 6], [7, 2], [1, 1])]] * 2)
    for step in range(2):
        update(learner, batches[step], step)
    meta = {"version": 2, "config": config.model_dump_json()}
    path = save_checkpoint(tmp_path / "checkpoints", "job_1", 2, learner.state(), meta)
    names = {file.name for file in path.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert ("model.safetensors" in names) is (kind != "path")
    expected = [update(learner, batches[step], step) for step in range(2, 4)]
    resumed = Learner(config)
    resumed.load_state(load_checkpoint(path).state)
    found = [update(resumed, batches[step], step) for step in range(2, 4)]
    for before, after in zip(expected, found, strict=True):
        kept = [name for name in before if name.startswith(("loss/", "policy/"))]
        assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert all(torch.equal(a, b) for a, b in zip(whole(learner).values(), whole(resumed).values(), strict=True))


@pytest.mark.parametrize("kind", ["random", "path"])
def test_a_checkpoint_is_read_by_peft_and_transformers_and_exported_whole(
    kind: str, lora: Job, on_disk: Job, batch: list[Group], tmp_path: Path
) -> None:
    config = on_disk() if kind == "path" else lora()
    learner = Learner(config)
    for step in range(2):
        update(learner, batch, step)
    meta = {"config": config.model_dump_json()}
    path = save_checkpoint(tmp_path / "checkpoints", "job_1", 1, learner.state(), meta)
    plain = build_model(config.model.model_copy(update={"lora": None}), 54, seed=config.seed)
    base = logits(plain)
    plain.load_state_dict(whole(learner), strict=False)
    expected = logits(plain)
    assert not torch.allclose(base, expected, atol=1e-3)

    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(path)), expected, atol=1e-5, rtol=0)
    under = build_model(config.model.model_copy(update={"lora": None}), 54, seed=config.seed)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(under, path)), expected, atol=1e-5, rtol=0)
    again = build_model(ModelConfig(path=str(path)), 54, seed=0)
    torch.testing.assert_close(logits(again), expected, atol=1e-5, rtol=0)
    export(path, tmp_path / "export")
    assert not (tmp_path / "export" / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("12+3=").input_ids == learner.tokenizer("12+3=").input_ids
    with pytest.raises(CheckpointError, match="not empty"):
        export(path, tmp_path / "export")


def test_an_adapter_of_another_base_is_refused(on_disk: Job, tmp_path: Path, batch: list[Group]) -> None:
    config = on_disk()
    learner = Learner(config)
    update(learner, batch)
    state = learner.state()
    other = ModelConfig(config=ARCHITECTURE, tokenizer="char")
    build_model(other, 54, seed=2).save_pretrained(tmp_path / "base")
    changed = Learner(config)
    before = copies(changed.weights())
    with pytest.raises(CheckpointError, match=r"model\.path"):
        changed.load_state(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in changed.weights())


def test_a_state_of_whole_weights_is_no_adapter(lora: Job, make_config: Callable[..., JobConfig]) -> None:
    with pytest.raises(CheckpointError, match="does not fit"):
        Learner(lora()).load_state(Learner(make_config()).state())


def test_wrong_targets_are_named(lora: Job) -> None:
    with pytest.raises(ConfigError, match=r"target_modules.*valid names are down_proj"):
        Learner(lora(lora={"target_modules": ["c_attn"]}))


def test_bfloat16_adapters_have_float32_masters(lora: Job, batch: list[Group]) -> None:
    learner = Learner(lora(model={"config": ARCHITECTURE, "dtype": "bfloat16"}, optimizer={"learning_rate": 1e-3}))
    update(learner, batch)
    assert {tensor.dtype for _, tensor in learner.weights()} == {torch.bfloat16}
    masters = [n for n in learner.state().models["policy"].optimizer if n.startswith("master.")]
    assert len(masters) == len(list(learner.weights()))


def test_experts_get_no_adapter(lora: Job, batch: list[Group]) -> None:
    architecture = {**ARCHITECTURE, "arch": "qwen3_moe", "experts": {"number": 4, "per_token": 2}}
    learner = Learner(lora(model={"config": architecture}))
    metrics = update(learner, batch)
    assert metrics["optimizer/grad_norm"] > 0
    assert metrics["moe/load_max"] >= 1
    assert all("self_attn" in name for name, _ in learner.weights())
