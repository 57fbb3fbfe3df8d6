"""The contract of a trainer backend, on ranks: every test of ``test_trainer_backends.py`` runs there, once per rank."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel

from penstock.services.trainer.backends.base import Backend, Role
from penstock.services.trainer.backends.fsdp.backend import FSDPBackend
from penstock.services.trainer.backends.local import LocalBackend
from penstock.services.trainer.backends.megatron.backend import MegatronBackend
from penstock.services.trainer.ranks.process_group import World
from penstock.shared.config.backend import FSDPConfig, MegatronConfig
from penstock.shared.config.jobs.job import OptimizerConfig
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import ConfigError
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


def foreign_model() -> GPT2LMHeadModel:
    """Return a small model of an architecture that our own decoder does not know, the same in each process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return GPT2LMHeadModel(GPT2Config(vocab_size=54, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()


def train_foreign(backend: Backend, rows: list[tuple[list[int], list[int]]]) -> dict[str, NDArray[np.float32]]:
    """Train three steps on ``rows``; return the norms, the scores, the reference's scores and all weights."""
    microbatch = CONTRACT.packed(rows) if rows else None
    norms = []
    for _ in range(3):
        backend.accumulate(microbatch, CONTRACT.nll, entropy=True)
        norms.append(backend.step(1e-2))
    everything = CONTRACT.packed(CONTRACT.ROWS)
    found = {"norms": torch.tensor(norms), "scores": backend.score(everything)}
    found["reference"] = backend.reference_logprobs(everything)
    backend.freeze_reference()
    found["frozen"] = backend.reference_logprobs(everything)
    return {name: tensor.detach().clone().numpy() for name, tensor in chain(found.items(), backend.weights())}


def shard_foreign(world: World, options: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Train ``foreign_model`` on this rank's share of the rows."""
    rows = CONTRACT.ROWS[: len(CONTRACT.ROWS) - 1][world.place.rank :: world.everybody.size]
    tokenizer, config = build_tokenizer(CONTRACT.MODEL), OptimizerConfig(max_grad_norm=1e9, eps=1e-3)
    sharding = FSDPConfig(type="fsdp", **options)
    return train_foreign(
        FSDPBackend(foreign_model(), tokenizer, sharding, config, world.everybody, keep_reference=True), rows
    )


@pytest.mark.long
@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {}), (3, {"cpu_offload": True})])
def test_fsdp_trains_any_model_as_one_process_does(ranks: Any, size: int, options: dict[str, Any]) -> None:
    """The third rank has no rows."""
    tokenizer, config = build_tokenizer(CONTRACT.MODEL), OptimizerConfig(max_grad_norm=1e9, eps=1e-3)
    local = LocalBackend(foreign_model(), tokenizer, config, keep_reference=True)
    expected = train_foreign(local, CONTRACT.ROWS[:-1])
    assert np.abs(expected["scores"] - expected["reference"]).max() > 0.01, "the steps change something"
    for found in ranks.run(size, shard_foreign, options):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=1e-5, rtol=1e-4, err_msg=name)


def refusal(world: World) -> str:
    """Return why this rank does not recompute the blocks of a model that the decoder does not know."""
    try:
        shard_foreign(world, {"activation_checkpointing": True})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_fsdp_recomputes_blocks_only_of_models_that_it_knows(ranks: Any) -> None:
    (found,) = ranks.run(1, refusal)
    assert "backend.activation_checkpointing: fsdp recomputes the blocks of Llama, Qwen and Mixtral" in found
    assert "not of GPT2LMHeadModel" in found


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
