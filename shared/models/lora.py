"""Low-rank adapters: added to a model in place, distinguished from the frozen base, merged into it for export.

The layers are peft's; the functional decoder computes them (`architecture.Adapted`). Adapters are named as in peft's
own files, base weights as in the Hugging Face model without adapters.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import forget_plan, plan_of
from penstock.shared.models.building import building
from penstock.shared.protocol.ids import derive_seed

__all__ = [
    "adapter_files",
    "adapter_parameters",
    "add_adapter",
    "base_parameters",
    "has_adapter",
    "is_adapter",
    "merged_weight",
    "merged_weights",
    "share_base",
    "stored_name",
    "without_adapter",
]

_ADAPTER = "default"
_FILE_PREFIX = "base_model.model."


def add_adapter(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Add an adapter, which leaves the outputs of ``model`` unchanged at first, and freeze all other weights.

    Args:
        seed: the job's seed; the global random state is restored.

    Raises:
        ConfigError: peft is not installed, a target is not a linear layer of this model, or the functional decoder does
            not support the architecture.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora needs the package 'peft': install penstock[lora]") from None
    targets = _targets(model, config)
    with building(derive_seed(seed, "lora")):
        peft.inject_adapter_in_model(_peft_config(config, targets), model, _ADAPTER)
    forget_plan(model)
    if plan_of(model) is None:
        raise ConfigError(f"model.lora: adapters need a Llama, Qwen or Mixtral model, not {type(model).__name__}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return model


def has_adapter(model: nn.Module) -> bool:
    """Return True if the model has an adapter."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters by their names in peft's files, in a fixed order."""
    return {stored_name(name): p for name, p in model.named_parameters() if is_adapter(name)}


def base_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return all parameters except adapters by their Hugging Face names, in the order of the model without adapters."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return {stored_name(name): p for name, p in named if not is_adapter(name)}


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, weight)`` of each base parameter with its adapter merged, in the order of ``base_parameters``. The
    model is not modified: merging in place and unmerging would accumulate rounding errors."""
    for name, _ in model.named_parameters():
        if not is_adapter(name):
            yield stored_name(name), merged_weight(model, name)


def merged_weight(model: nn.Module, name: str) -> Tensor:
    """Return the parameter ``name`` with its adapter merged: ``W + scale · B A``, added in float32 and rounded once. A
    parameter without adapter is returned unchanged.

    Args:
        name: name in ``named_parameters`` of a parameter that belongs to no adapter.
    """
    weight: Tensor = model.get_parameter(name).detach()
    layer = name.removesuffix(".base_layer.weight")
    if layer == name:
        return weight
    module: Any = model.get_submodule(layer)
    a, b = (getattr(module, part)[_ADAPTER].weight.detach().float() for part in ("lora_A", "lora_B"))
    merged: Tensor = weight.float() + module.scaling[_ADAPTER] * (b @ a)
    return merged.to(weight.dtype)


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Merge the adapter of ``model`` into its weights and remove it, in place."""
    merged = dict(merged_weights(model))
    wrapped = [(name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")]
    with torch.no_grad():
        for name, module in wrapped:
            module.base_layer.weight.copy_(merged[f"{name}.weight"])
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    # transformers stores the adapter and its mapping of names, and would save both
    model._hf_peft_config_loaded, model._weight_conversions = False, None
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    forget_plan(model)
    return model


def share_base(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of ``model`` with its own copy of the adapters; both models share the base weights."""
    shared = {id(parameter): parameter for parameter in base_parameters(model).values()}
    twin: PreTrainedModel = copy.deepcopy(model, shared)
    for parameter in adapter_parameters(twin).values():
        parameter.requires_grad_(False)
    return twin.eval()


def adapter_files(model: PreTrainedModel, config: LoraConfig, *, base: str | None) -> dict[str, bytes]:
    """Return the files that peft stores beside an adapter's weights, by name. ``base``: path of the base model."""
    described = _peft_config(config, _targets(model, config), base_model_name_or_path=base, inference_mode=True)
    with tempfile.TemporaryDirectory() as name:
        described.save_pretrained(name)
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}


def _peft_config(config: LoraConfig, targets: list[str], **more: Any) -> Any:
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        **more,
    )


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of the layers to adapt: linear layers inside the blocks, not the head."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name)
    plain = (name.split(".lora_")[0].removesuffix(".base_layer") for name in linear)
    valid = sorted({name.rpartition(".")[2] for name in plain})
    if config.target_modules == "all-linear":
        return valid
    unknown = sorted(set(config.target_modules) - set(valid))
    if unknown or not config.target_modules:
        raise ConfigError(
            f"model.lora.target_modules: {type(model).__name__} has no linear layer {unknown} inside its blocks; "
            f"valid names are {', '.join(valid)}"
        )
    return sorted(set(config.target_modules))


def is_adapter(name: str) -> bool:
    """Return True if ``name``, a name in ``named_parameters``, belongs to a parameter of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def stored_name(name: str) -> str:
    """Convert a parameter name of ``named_parameters`` to the name that weight files use.

    Adapter parameters have the names of peft's files; all others have the names of the model without adapters.
    """
    if is_adapter(name):
        return _FILE_PREFIX + name.replace(f".{_ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")
