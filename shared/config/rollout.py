"""Which engine of the rollout workers decodes a job, with the options and the limits of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.shared.config.base import CodeName, StrictModel
from penstock.shared.config.model import ModelConfig
from penstock.shared.protocol.generation import Caps

__all__ = [
    "ENGINE_PACKAGES",
    "ENVIRONMENTS",
    "ClassConfig",
    "EmbeddedConfig",
    "RolloutConfig",
    "SglangConfig",
    "VllmConfig",
    "check_engine",
]

ENGINE_PACKAGES = ("vllm",)
"""Packages, as they are imported, of engines that run inside a rollout worker and need an interpreter of their own."""
ENVIRONMENTS = (*ENGINE_PACKAGES, "sglang")
"""Engines that have an interpreter of their own, by name: the first ones run in workers, the others in a child."""


class EmbeddedConfig(StrictModel):
    """Our own decoder, in the rollout worker's process, over the same model code that trains."""

    engine: Literal["embedded"] = "embedded"

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=True
    )


class VllmConfig(StrictModel):
    """vLLM, started by the rollout worker, which then runs in an interpreter of its own (`penstock up --engine vllm`).

    Log-probs are vLLM's `processed_logprobs`: with `top_p`, `top_k`, penalties or `min_new_tokens` they are those of
    the truncated distribution, which evaluations may have and training has not.
    """

    engine: Literal["vllm"] = "vllm"
    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for keys and values, in GiB. Sequences that do not fit are computed again later, which costs time."""
    max_length: int | None = Field(None, ge=2)
    """Most tokens of a prompt and its completion; keys and values of one such sequence must fit in kv_cache_gib. None:
    what the model takes, which may be too much."""

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=False,
        staging="reference", adapters=False, routers=False, held=False, candidates=False, fp32_head=False, forms=False,
        plain_logprobs=False,
    )  # fmt: skip


class SglangConfig(StrictModel):
    """A server of SGLang, which the rollout worker starts in an interpreter of its own (`penstock engines install
    sglang`), or one that runs already (PENSTOCK_SGLANG_URL of the worker).

    Log-probs are of logits / temperature before `top_p` and `top_k`, and after penalties, biases and `min_new_tokens`.
    """

    engine: Literal["sglang"] = "sglang"
    max_length: int | None = Field(None, ge=2)
    """Most tokens of a prompt and its completion. None: what the model takes, which may be too much."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the device's memory for weights and cache, of a server that the worker starts. None: SGLang's choice."""
    seeded: bool = True
    """On a GPU: the same seed gives the same tokens. SGLang needs slower kernels for that; without them it ignores
    seeds."""

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=False,
        staging="reference", adapters=False, routers=False, held=False, candidates=False, fp32_head=False, forms=False,
        plain_logprobs=False,
    )  # fmt: skip


class ClassConfig(StrictModel):
    """An engine of yours: a Python class, which rollout workers import; see
    [Bring your own engine](how-to/engine.md)."""

    engine: Literal["class"] = "class"
    path: CodeName
    """`package.module:Class`, importable by the rollout service, or `./file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the class, which says what it takes and refuses the rest."""
    max_length: int | None = Field(None, ge=2)
    """Most tokens of a prompt and its completion. None: what the model takes."""

    caps: ClassVar[Caps] = VllmConfig.caps


def _embedded_unless_named(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    if ":" in str(data.get("engine")):
        raise ValueError(f"engine: name a class of yours by engine: class and path: '{data['engine']}'")
    return {"engine": "embedded", **data}


AnyRollout = EmbeddedConfig | VllmConfig | SglangConfig | ClassConfig
RolloutConfig = Annotated[AnyRollout, Field(discriminator="engine"), BeforeValidator(_embedded_unless_named)]


def check_engine(rollout: AnyRollout, model: ModelConfig, wants: Iterator[tuple[str, str, bool]]) -> None:
    """Raise ValueError that names the key of what the engine cannot do.

    Args:
        wants: of a kind of job (key, field of ``Caps``, True if the job asks for it).
    """
    lora, moe = model.lora, model.moe
    asked = [
        ("model.lora.publish: 'adapters'", "adapters", lora is not None and lora.publish == "adapters"),
        ("model.moe.router_replay", "routers", moe is not None and moe.router_replay),
        ("model.fp32_head", "fp32_head", model.fp32_head),
        *wants,
    ]
    for key, cap, wanted in asked:
        if wanted and not getattr(rollout.caps, cap):
            raise ValueError(f"rollout.engine '{rollout.engine}' cannot do {key}{_INSTEAD.get(cap, '')}")


_INSTEAD = {
    "adapters": ": use model.lora.publish: merged",
    "candidates": ": it holds one version at a time",
    "held": ": it holds the newest version alone",
}
