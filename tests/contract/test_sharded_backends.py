"""The contract of a trainer backend, on ranks: every test of ``test_trainer_backends.py`` runs there, once per rank."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.services.trainer.backends.base import Role
from penstock.services.trainer.backends.fsdp.backend import FSDPBackend
from penstock.services.trainer.backends.megatron.backend import MegatronBackend
from penstock.services.trainer.ranks.process_group import World
from penstock.shared.config.backend import FSDPConfig, MegatronConfig
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.models.critic import critic_of
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.models.lora import add_adapter


def load_contract() -> ModuleType:
    """Import the file of the contract as a module of this process, and return it."""
    path = Path(__file__).with_name("test_trainer_backends.py")
    spec = importlib.util.spec_from_file_location("trainer_backend_contract", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CONTRACT = load_contract()
NAMES = [
    name
    for name, test in inspect.getmembers(CONTRACT, inspect.isfunction)
    if name.startswith("test_") and list(inspect.signature(test).parameters) == ["open_backend"]
]


def open_fsdp(world: World, role: Role = "policy", *, lora: LoraConfig | None = None, **options: Any) -> FSDPBackend:
    """Open the model of the contract, sharded over all ranks; ``lora`` configures an adapter of the policy."""
    tokenizer = build_tokenizer(CONTRACT.MODEL)
    model = build_model(CONTRACT.MODEL, len(tokenizer), seed=5)
    if role == "critic":
        model, lora = critic_of(model), None
    if lora is not None:
        add_adapter(model, lora, seed=5)
    config, optimizer = FSDPConfig(type="fsdp", **options), OptimizerConfig(max_grad_norm=1e9)
    return FSDPBackend(
        model, tokenizer, config, optimizer, world.everybody, keep_reference=role == "policy", role=role, lora=lora
    )


def open_megatron(world: World, role: Role = "policy", **options: Any) -> MegatronBackend:
    """Open the model of the contract, sharded over all ranks."""
    tokenizer = build_tokenizer(CONTRACT.MODEL)
    model = build_model(CONTRACT.MODEL, len(tokenizer), seed=5)
    model = critic_of(model) if role == "critic" else model
    config = MegatronConfig(**options)
    optimizer = OptimizerConfig(max_grad_norm=1e9)
    return MegatronBackend(model, tokenizer, optimizer, config, keep_reference=role == "policy", role=role)


OPEN = {"fsdp": open_fsdp, "megatron": open_megatron}


def run_contract(world: World, backend: str, options: dict[str, Any]) -> dict[str, str]:
    """Run the contract on this rank; return for each test its traceback, or an empty string if it passed."""
    found = {}
    for name in NAMES:
        try:
            getattr(CONTRACT, name)(functools.partial(OPEN[backend], world, **options))
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        if not world.everybody.agree(not found[name]):
            break  # ranks at different collectives cannot continue together
    return found


FSDP: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {"activation_checkpointing": True, "cpu_offload": True, "reshard_after_forward": True}),
    "adapters": (2, {"lora": LoraConfig(rank=4)}),
}
"""Number of ranks, and options. The case of two ranks uses all options that save memory."""


Outcomes = Callable[[str, int, dict[str, Any]], list[dict[str, str]]]


@pytest.fixture(scope="module")
def outcomes(ranks: Any) -> Outcomes:
    """Runs the contract once for each backend with its number of ranks and options; returns what each rank found."""
    known: dict[str, list[dict[str, str]]] = {}

    def of(backend: str, size: int, options: dict[str, Any]) -> list[dict[str, str]]:
        key = f"{backend} {size} {options}"
        if key not in known:
            known[key] = ranks.run(size, run_contract, backend, options)
        return known[key]

    return of


@pytest.mark.long
@pytest.mark.parametrize("case", ["two", "one", "adapters"])
@pytest.mark.parametrize("name", NAMES)
def test_fsdp(outcomes: Outcomes, case: str, name: str) -> None:
    for rank, found in enumerate(outcomes("fsdp", *FSDP[case])):
        assert not found.get(name, "an earlier test failed"), f"rank {rank}:\n{found.get(name)}"


CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "tensor": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "stages": (2, {"pipeline_parallel": 2, "activation_checkpointing": True}),
}
"""Number of ranks, and how the model is sharded over them."""


@pytest.mark.parametrize("cut", ["whole", *(pytest.param(cut, marks=pytest.mark.long) for cut in ("tensor", "stages"))])
@pytest.mark.parametrize("name", NAMES)
def test_megatron(outcomes: Outcomes, cut: str, name: str) -> None:
    for rank, found in enumerate(outcomes("megatron", *CUTS[cut])):
        assert not found.get(name, "an earlier test failed"), f"rank {rank}:\n{found.get(name)}"
