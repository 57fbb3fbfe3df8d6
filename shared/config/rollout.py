"""Selection of the rollout engine of a job, with the options and capabilities of each engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.shared.config.base import CodeName, StrictModel
from penstock.shared.config.model import ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import Caps, PauseMode

__all__ = [
    "ANY_MODEL",
    "ENGINE_PACKAGES",
    "ENVIRONMENTS",
    "ENVIRONMENT_OF",
    "IN_PROCESS",
    "ROPE_TYPES",
    "AnyRollout",
    "ClassConfig",
    "EmbeddedConfig",
    "RolloutConfig",
    "SglangConfig",
    "TransformersConfig",
    "VllmConfig",
    "VllmServerConfig",
    "check_decoder",
    "check_engine",
    "longest_exact",
]

ANY_MODEL = "rollout.engine: transformers runs any causal language model by its own forward pass, more slowly"
"""Way out for a model that the embedded engine does not decode."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that our decoder computes: those whose angles depend only on the position. The angles of `dynamic`
and `longrope` also depend on the length of the text."""
OnUpdate = Literal["keep", "restart", "drain"]
ENGINE_PACKAGES = ("vllm",)
"""Import names of engine packages that run inside a rollout worker and need an interpreter of their own."""
ENVIRONMENT_OF = {"vllm": "vllm", "vllm_server": "vllm", "sglang": "sglang"}
"""Name of the Python environment of each engine that needs a separate environment. Engines of ``ENGINE_PACKAGES`` run
inside the rollout worker, all others in a child process of the worker."""
ENVIRONMENTS = tuple(dict.fromkeys(ENVIRONMENT_OF.values()))
"""Names of the Python environments that ``penstock engines install`` creates."""


class _AnyEngine(StrictModel):
    """Keys of the section `rollout` that every engine has."""

    on_update: OnUpdate = "keep"
    """Handling of training completions that run when new weights arrive. `keep`: they go on under the new version, and
    spans record which version generated which token. `restart`: the worker discards all completions of their groups and
    generates them again under the new version, so that every group has one version. `drain`: a worker that learns of a
    newer version begins no group, and loads the version when its groups have ended. Live answers and evaluations always
    go on."""
    drain_s: float = Field(30.0, gt=0, le=3600)
    """Longest time that `on_update: drain` holds new groups back (seconds). After that a worker begins groups again and
    loads the version, and the completions in progress go on as with `keep`, because `restart` would discard the longest
    ones each time."""
    checkpoint_s: float = Field(10.0, ge=0, le=3600)
    """Interval (seconds) at which a worker saves its training completions in progress, in groups that have run for at
    least one interval. If the worker dies, another one continues from the saved tokens, within `train.max_lag`. A
    worker that drains saves its groups in any case. 0: save nothing, so groups begin again. Groups with an
    `environment` or router replay always begin again."""


class EmbeddedConfig(_AnyEngine):
    """Penstock's own decoder; runs in the rollout worker's process and uses the same model code as the trainer."""

    engine: Literal["embedded"] = "embedded"

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=True
    )


class TransformersConfig(_AnyEngine):
    """Any causal language model of the transformers library, by its own forward pass; runs in the rollout worker's
    process. Exact and slow: one completion is computed at a time.
    """

    engine: Literal["transformers"] = "transformers"
    max_length: int | None = Field(None, ge=2)
    """Maximum number of tokens of a prompt plus its completion. None: the maximum of the model, which some models
    do not name."""

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=True,
        routers=False,
    )  # fmt: skip


class _VllmOptions(_AnyEngine):
    """Options and capabilities of vLLM, wherever it runs."""

    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for the key/value cache, in GiB. Sequences that do not fit are recomputed later, which costs time."""
    max_length: int | None = Field(None, ge=2)
    """Maximum number of tokens of a prompt plus its completion; the key/value cache of one such sequence must fit in
    kv_cache_gib. None: the maximum of the model, which may need too much memory."""

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=False,
        staging="reference", adapters=False, routers=False, held=False, candidates=False, fp32_head=False, forms=False,
        plain_logprobs=False,
    )  # fmt: skip


class VllmConfig(_VllmOptions):
    """vLLM inside the rollout worker. The worker then runs in the Python interpreter of vLLM's environment
    (`penstock up --engine vllm`).

    Log-probs are vLLM's `processed_logprobs`: with `top_p`, `top_k`, penalties or `min_new_tokens` they are those of
    the modified distribution. `evaluation.sampling` may set such parameters; the sampling for training may not.
    """

    engine: Literal["vllm"] = "vllm"


class VllmServerConfig(_VllmOptions):
    """vLLM's HTTP server, which the rollout worker starts as a child process. The worker keeps Penstock's interpreter;
    the server uses the interpreter that `penstock engines install vllm` installs (`penstock up --engine vllm_server`).

    Log-probs have the same definition as with engine `vllm`.
    """

    engine: Literal["vllm_server"] = "vllm_server"


class SglangConfig(_AnyEngine):
    """SGLang server. The rollout worker starts it in a separate interpreter (`penstock engines install sglang`), or
    connects to a running server (PENSTOCK_SGLANG_URL of the worker).

    Log-probs are of logits / temperature before `top_p` and `top_k`, and after penalties, biases and `min_new_tokens`.
    """

    engine: Literal["sglang"] = "sglang"
    max_length: int | None = Field(None, ge=2)
    """Maximum number of tokens of a prompt plus its completion. None: the maximum of the model, which may need too much
    memory."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Fraction of the device memory for weights and cache, if the worker starts the server. None: SGLang's default."""
    seeded: bool = True
    """Reproducible sampling on a GPU: the same seed gives the same tokens. SGLang needs slower kernels for it; without
    them it ignores seeds."""

    caps: ClassVar[Caps] = Caps(
        transports=("shm", "tcp", "disk"), pause_modes=("abort", "drain", "keep"), native_spans=True, sleep=False,
        staging="reference", adapters=False, routers=False, held=False, candidates=False, fp32_head=False, forms=False,
        plain_logprobs=False,
    )  # fmt: skip


class ClassConfig(_AnyEngine):
    """A custom engine: a Python class that the rollout workers import; see
    [Bring your own engine](how-to/engine.md)."""

    engine: Literal["class"] = "class"
    path: CodeName
    """`package.module:Class`, importable by the rollout service, or `./file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the class, which declares the valid ones and rejects all others."""
    max_length: int | None = Field(None, ge=2)
    """Maximum number of tokens of a prompt plus its completion. None: the maximum of the model."""

    caps: ClassVar[Caps] = VllmConfig.caps


def _embedded_unless_named(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    if ":" in str(data.get("engine")):
        raise ValueError(f"engine: name a class of yours by engine: class and path: '{data['engine']}'")
    return {"engine": "embedded", **data}


IN_PROCESS = (EmbeddedConfig, TransformersConfig)
"""Engines that every rollout worker has: they need no environment, and no server, of their own."""
AnyRollout = EmbeddedConfig | TransformersConfig | VllmConfig | VllmServerConfig | SglangConfig | ClassConfig
RolloutConfig = Annotated[AnyRollout, Field(discriminator="engine"), BeforeValidator(_embedded_unless_named)]


def check_engine(
    rollout: AnyRollout, model: ModelConfig, wants: Iterator[tuple[str, str, bool]], *, is_updated: bool
) -> None:
    """Raise ValueError naming the configuration key if a job needs a capability that the engine lacks.

    Args:
        wants: requirements of the job kind: (key, field of ``Caps``, True if the job requires it).
        is_updated: True if the job changes the weights of its engines.
    """
    if not is_updated and rollout.on_update != "keep":
        raise ValueError("rollout.on_update: the weights of this job never change; leave it out")
    if is_updated and _AT_UPDATE[rollout.on_update] not in rollout.caps.pause_modes:
        raise ValueError(f"rollout.engine '{rollout.engine}' cannot do rollout.on_update: '{rollout.on_update}'")
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


def check_decoder(rollout: AnyRollout, described: Mapping[str, Any], where: str, *, lora: bool = False) -> None:
    """Raise ConfigError if a model's config.json shows that the embedded engine cannot decode the model. Models that it
    cannot decode for other reasons are rejected when the engine loads them (``shared/models/architecture.py``).

    Args:
        described: the config.json.
        where: file of the config.json, for the message.
        lora: True if an adapter of the model is trained, for which the trainer uses the same decoder.

    Raises:
        ConfigError: the embedded engine does not decode this model, and ``rollout`` is this engine or ``lora`` is True.
    """
    kind = described.get("model_type")
    if not (lora or isinstance(rollout, EmbeddedConfig)) or not isinstance(kind, str):
        return
    if kind not in _DECODED:
        flaw = f"model_type '{kind}', and the embedded engine decodes {', '.join(_DECODED)}"
    elif found := _undecoded(kind, described):
        flaw = f"{found}, which the embedded engine does not decode"
    else:
        return
    if lora:
        raise ConfigError(f"model.lora: {where} has {flaw}; adapters are trained only on models that it decodes")
    raise ConfigError(f"model.path: {where} has {flaw}; {ANY_MODEL}")


def longest_exact(described: Mapping[str, Any]) -> int | None:
    """Return the maximum length of a text, in tokens, up to which trainer and engine compute the same log-probs. Return
    None if ``described``, the model's parsed config.json, gives no maximum.

    Rotary embeddings of type `longrope` change the angles of all tokens once a text exceeds a length, and those of type
    `dynamic` beyond ``max_position_embeddings``. The trainer reads whole texts, so beyond this length it would compute
    other log-probs than an engine, which sampled most of the tokens when the text was shorter.
    """
    described = described.get("text_config") or described
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each type of layer
    named = [described.get("max_position_embeddings"), described.get("n_positions")]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) == "longrope":
            named += [source.get("original_max_position_embeddings") for source in (kind, described)]
    return min((length for length in named if isinstance(length, int)), default=None)


def _undecoded(kind: str, described: Mapping[str, Any]) -> str:
    """Name the first property in a config.json that the embedded engine cannot decode; '' if it can decode the
    model."""
    rope = described.get("rope_parameters") or described.get("rope_scaling")
    rope_type = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    layers = described.get("layer_types")
    flaws = {
        f"hidden_act '{described.get('hidden_act')}'": described.get("hidden_act") not in (None, "silu"),
        f"rope_type '{rope_type}'": rope_type is not None and rope_type not in ROPE_TYPES,
        "layers with a sliding window": isinstance(layers, list) and any(each != "full_attention" for each in layers),
        "a sliding window": described.get(_DECODED[kind]),
        "attention_dropout": described.get("attention_dropout"),
    }
    return next((flaw for flaw, has in flaws.items() if has), "")


_DECODED = {
    "llama": "",
    "qwen2": "",
    "qwen3": "",
    "qwen3_moe": "use_sliding_window",
    "mixtral": "sliding_window",
}
"""``model_type`` of the models that the embedded engine decodes, and the key, if any, that gives all of their layers a
sliding window."""
_AT_UPDATE: dict[OnUpdate, PauseMode] = {"keep": "keep", "restart": "abort", "drain": "keep"}
"""Pause mode of the engine for each value of ``on_update``. With `drain`, completions that still run after ``drain_s``
go on under the new version."""
_INSTEAD = {
    "adapters": ": use model.lora.publish: merged",
    "candidates": ": it holds one version at a time",
    "held": ": it holds the newest version alone",
}
