"""The contract of a trainer backend, on ranks: every test of ``test_trainer_backends.py`` runs there, once per rank."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.services.trainer.backends.base import Role
from penstock.services.trainer.backends.fsdp.backend import FSDPBackend
from penstock.services.trainer.backends.megatron.backend import MegatronBackend
from penstock.services.trainer.process_group import World
from penstock.shared.config.backend import FSDPConfig, MegatronConfig
from penstock.shared.config.job import OptimizerConfig
from penstock.shared.models.critic import critic_of
from penstock.shared.models.loading import build_model, build_tokenizer

SIZES = (1, 2)


def load_contract() -> ModuleType:
    """The file of the contract as a module of this process."""
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


def open_fsdp(world: World, role: Role = "policy", **options: Any) -> FSDPBackend:
    """The model of the contract, cut over all ranks."""
    tokenizer = build_tokenizer(CONTRACT.MODEL)
    model = build_model(CONTRACT.MODEL, len(tokenizer), seed=5)
    model = critic_of(model) if role == "critic" else model
    config, optimizer = FSDPConfig(type="fsdp", **options), OptimizerConfig(max_grad_norm=1e9)
    keep_reference = role == "policy"
    return FSDPBackend(model, tokenizer, config, optimizer, world.everybody, keep_reference=keep_reference, role=role)


def open_megatron(world: World, role: Role = "policy", **options: Any) -> MegatronBackend:
    """The model of the contract, cut over all ranks."""
    tokenizer = build_tokenizer(CONTRACT.MODEL)
    model = build_model(CONTRACT.MODEL, len(tokenizer), seed=5)
    model = critic_of(model) if role == "critic" else model
    config = MegatronConfig(tensor_parallel=world.place.size, **options)
    optimizer = OptimizerConfig(max_grad_norm=1e9)
    return MegatronBackend(model, tokenizer, optimizer, config, keep_reference=role == "policy", role=role)


OPEN = {"fsdp": open_fsdp, "megatron": open_megatron}


def run_contract(world: World, backend: str, options: dict[str, Any]) -> dict[str, str]:
    """Every test with what was wrong with it."""
    found = {}
    for name in NAMES:
        try:
            getattr(CONTRACT, name)(functools.partial(OPEN[backend], world, **options))
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        if not world.everybody.agree(not found[name]):
            break  # ranks that do not stand at the same place cannot go on together
    return found


@pytest.fixture(scope="module")
def outcomes(ranks: Any) -> dict[int, list[dict[str, str]]]:
    """By number of ranks, of each rank. With two ranks, everything that saves memory is on."""
    frugal = {"activation_checkpointing": True, "cpu_offload": True, "reshard_after_forward": True}
    return {size: ranks.run(size, run_contract, "fsdp", frugal if size > 1 else {}) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_fsdp(outcomes: dict[int, list[dict[str, str]]], size: int, name: str) -> None:
    for rank, found in enumerate(outcomes[size]):
        assert not found.get(name, "an earlier test failed"), f"rank {rank}:\n{found.get(name)}"


@pytest.fixture(scope="module")
def megatron_outcomes(ranks: Any) -> dict[int, list[dict[str, str]]]:
    """By number of tensor-parallel ranks, of each rank."""
    return {size: ranks.run(size, run_contract, "megatron", {"sequence_parallel": size > 1}) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_megatron(megatron_outcomes: dict[int, list[dict[str, str]]], size: int, name: str) -> None:
    for rank, found in enumerate(megatron_outcomes[size]):
        assert not found.get(name, "an earlier test failed"), f"rank {rank}:\n{found.get(name)}"
