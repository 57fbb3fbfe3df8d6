"""Adapters in a model: their output, their names, and files that peft and transformers can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from penstock.shared.config.lora import LoraConfig
from penstock.shared.config.model import ArchitectureConfig, ExpertsConfig, ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models import build_model, hidden_states, pack, supports
from penstock.shared.models.lora import (
    adapter_files,
    adapter_parameters,
    add_adapter,
    base_parameters,
    has_adapter,
    merged_weights,
    share_base,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
IDS = [5, 9, 3, 17, 4]


def model_of(arch: str = "qwen3", dtype: str = "float32") -> PreTrainedModel:
    experts = ExpertsConfig(number=4) if arch == "qwen3_moe" else None
    architecture = ArchitectureConfig(
        arch=arch, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, experts=experts
    )
    return build_model(ModelConfig(config=architecture, tokenizer="char", dtype=dtype), 54, seed=0)


def adapted(arch: str = "qwen3", dtype: str = "float32", **lora: Any) -> PreTrainedModel:
    """Return a model whose adapter changes the output."""
    model = add_adapter(model_of(arch, dtype), LoraConfig(rank=4, **lora), seed=3)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(model).items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=noise)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.tensor([IDS])).logits[0].float()


@torch.no_grad()
def hidden(model: PreTrainedModel) -> Tensor:
    return hidden_states(model, pack([IDS]))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_a_new_adapter_changes_nothing_and_a_trained_one_is_computed_as_peft_does(arch: str) -> None:
    plain = model_of(arch)
    before = hidden(plain)  # computed before the adapter replaces modules
    assert torch.equal(hidden(add_adapter(plain, LoraConfig(rank=4), seed=3)), before)
    model = adapted(arch)
    assert supports(model)
    found = hidden(model)
    assert not torch.allclose(found, before, atol=1e-2)
    with torch.no_grad():
        expected = model.model(torch.tensor([IDS])).last_hidden_state[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8.0 / 4), (True, 8.0 / 2)])
def test_the_adapter_is_scaled(rslora: bool, scale: float) -> None:
    model = adapted(alpha=8.0, rslora=rslora, target_modules=["q_proj"])
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 16)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x) - layer.base_layer(x), scale * x @ a.T @ b.T)


def test_only_the_adapter_has_gradients() -> None:
    model = adapted()
    hidden_states(model, pack([IDS])).sum().backward()
    assert all(p.grad is not None for p in adapter_parameters(model).values())
    assert all(p.grad is None and not p.requires_grad for p in base_parameters(model).values())


def test_parameter_names_are_those_of_the_files() -> None:
    plain, model = model_of(), adapted(target_modules=["v_proj", "down_proj"])
    assert list(base_parameters(model)) == [name for name, _ in plain.named_parameters()]
    names = list(adapter_parameters(model))
    assert names[:2] == [f"base_model.model.model.layers.0.self_attn.v_proj.lora_{part}.weight" for part in ("A", "B")]
    assert len(names) == 2 * 2 * 2
    assert has_adapter(model)
    assert not has_adapter(plain)


def test_a_new_adapter_depends_on_its_seed_and_keeps_the_global_random_state() -> None:
    state = torch.get_rng_state()
    first, again, other = (add_adapter(model_of(), LoraConfig(), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(*(adapter_parameters(m).values() for m in (first, again, other)), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_the_adapted_model_and_leave_it_alone(dtype: str, tmp_path: Path) -> None:
    model = adapted(dtype=dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    merged = dict(merged_weights(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    plain = model_of(dtype=dtype)
    plain.load_state_dict({**plain.state_dict(), **merged})
    plain.tie_weights()
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5 if dtype == "float32" else 0.1, rtol=0)
    assert {tensor.dtype for tensor in merged.values()} == {plain.dtype}
    plain.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(plain))


def test_peft_reads_the_adapter(tmp_path: Path) -> None:
    config = LoraConfig(rank=4, alpha=6.0, rslora=True, target_modules=["q_proj", "up_proj"])
    model = adapted(**config.model_dump(exclude={"rank"}))
    base = tmp_path / "base"
    model_of().save_pretrained(base)
    save_file(
        {name: p.detach() for name, p in adapter_parameters(model).items()}, tmp_path / "adapter_model.safetensors"
    )
    for name, data in adapter_files(model, config, base=str(base)).items():
        (tmp_path / name).write_bytes(data)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    assert sorted(described["target_modules"]) == ["q_proj", "up_proj"]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    with loaded.disable_adapter():
        assert not torch.allclose(logits(loaded), logits(model), atol=1e-2)


def test_a_twin_shares_the_base_and_owns_its_adapter() -> None:
    model = adapted()
    twin = share_base(model)
    own, other = base_parameters(model), base_parameters(twin)
    assert all(own[name] is other[name] for name in own)
    frozen = hidden(twin)
    for parameter in adapter_parameters(model).values():
        parameter.data.mul_(2)
    assert torch.equal(hidden(twin), frozen)
    assert not torch.allclose(hidden(model), frozen, atol=1e-3)
    assert not any(p.requires_grad for p in adapter_parameters(twin).values())


@pytest.mark.parametrize("targets", [["q_proj", "query"], ["lm_head"], []])
def test_targets_that_do_not_exist_are_named_with_the_valid_ones(targets: list[str]) -> None:
    with pytest.raises(ConfigError, match="down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        add_adapter(model_of(), LoraConfig(target_modules=targets), seed=0)


def test_experts_have_no_adapter() -> None:
    with pytest.raises(ConfigError, match="valid names are k_proj, o_proj, q_proj, v_proj"):
        add_adapter(model_of("qwen3_moe"), LoraConfig(target_modules=["gate_proj"]), seed=0)


def test_an_architecture_without_a_functional_decoder_is_refused() -> None:
    config = MistralConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=1, head_dim=8)  # fmt: skip
    with pytest.raises(ConfigError, match="MistralForCausalLM"):
        add_adapter(AutoModelForCausalLM.from_config(config), LoraConfig(), seed=0)
