"""Rollout engines behind the ``Engine`` protocol, and the functions that open the engine of a job."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from penstock.services.rollout.engines.adapter import ModelFiles
from penstock.services.rollout.engines.base import Engine, Updatable, UpdatableByReference, UpdateMode
from penstock.services.rollout.engines.constraint import Grammars
from penstock.services.rollout.engines.embedded.engine import EmbeddedEngine
from penstock.services.rollout.engines.transformers import TransformersEngine, longest_text
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rollout import (
    ENGINE_PACKAGES,
    ENVIRONMENT_OF,
    IN_PROCESS,
    AnyRollout,
    ClassConfig,
    RolloutConfig,
    SglangConfig,
    TransformersConfig,
    VllmConfig,
    VllmServerConfig,
)
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.building import building, building_apart
from penstock.shared.models.loading import build_model, resolve_device, stop_token_ids
from penstock.shared.models.lora import add_adapter, base_parameters
from penstock.shared.weights import digest_of_tensors, layout_of

__all__ = [
    "EmbeddedEngine",
    "Engine",
    "TransformersEngine",
    "Updatable",
    "UpdatableByReference",
    "UpdateMode",
    "lacks_engine",
    "open_engine",
    "open_job_engine",
    "start_engine",
    "weights_alone",
]


COMMIT = "COMMIT"
"""File that marks a checkpoint of a job as complete."""


def lacks_engine(rollout: RolloutConfig, settings: ServiceSettings) -> bool:
    """Return True if this worker cannot run the job's engine: its Python package, interpreter or server is missing."""
    if rollout.engine in ENGINE_PACKAGES:
        return importlib.util.find_spec(rollout.engine) is None
    return rollout.engine in ENVIRONMENT_OF and rollout.engine not in settings.engines


def open_job_engine(
    config: TextJob | ServingJob, tokenizer: PreTrainedTokenizerFast, settings: ServiceSettings
) -> Engine:
    """Open the engine that the job selects; blocks while the model is loaded.

    Raises:
        ConfigError: as ``open_engine``.
    """
    if not isinstance(config.rollout, IN_PROCESS):
        return _open_adapter(config, config.rollout, tokenizer, settings)
    return open_engine(
        config.model, tokenizer, max_running=config.placement.max_running, seed=config.seed,
        device=resolve_device(config.placement.device), rollout=config.rollout,
    )  # fmt: skip


async def start_engine(engine: Engine, rollout: AnyRollout) -> None:
    """Start the engine of a job. While an engine of a user's class starts, this worker builds no other model: such an
    engine may build a model of its own, and concurrent builds would disturb each other.

    Raises:
        ConfigError: the engine does not support this model on this machine.
        Unavailable: the engine does not start.
    """
    if not isinstance(rollout, ClassConfig):
        await engine.start()
        return
    async with building_apart():
        await engine.start()


def open_engine(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_running: int,
    seed: int,
    device: str = "cpu",
    version: int = 0,
    digest: str = "",
    rollout: AnyRollout | None = None,
) -> Engine:
    """Load a model and return an engine in this process that owns the model. Blocks while the model loads.

    Args:
        max_running: maximum number of sequences decoded at once.
        seed: seed of the initial weights if ``config`` builds a new model.
        device: torch device of the model.
        version: policy version of the loaded weights.
        digest: digest of the loaded weights.
        rollout: selects the engine: that of ``TransformersConfig``, or the embedded engine.

    Raises:
        ConfigError: the model cannot be loaded, or the engine does not support its architecture.
    """
    model = build_model(config, len(tokenizer), seed=seed).to(device)
    _check_routers(model, config)
    base = ""
    if config.lora is not None and config.lora.publish == "adapters":
        add_adapter(model, config.lora, seed=seed)
        base = digest_of_tensors(base_parameters(model).items())
    stop_ids = stop_token_ids(tokenizer, model)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    kind: type[EmbeddedEngine] = EmbeddedEngine
    max_length: int | None = None
    if isinstance(rollout, TransformersConfig):
        kind, max_length = TransformersEngine, longest_text(model, rollout.max_length)
    return kind(
        model,
        max_running=max_running,
        max_length=max_length,
        stop_ids=stop_ids,
        detokenize=_detokenizer(tokenizer),
        version=version,
        digest=digest,
        base=base,
        record_routes=config.replay_bytes_per_token > 0,
        grammars=Grammars(tokenizer, vocab_size=vocab_size, stop_ids=stop_ids),
    )


def _detokenizer(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[int]], str]:
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=False))


def _open_adapter(
    config: TextJob | ServingJob,
    options: VllmConfig | VllmServerConfig | SglangConfig | ClassConfig,
    tokenizer: PreTrainedTokenizerFast,
    settings: ServiceSettings,
) -> Engine:
    """Open the adapter of an external engine. The engine reads the model from a directory; write the model there if
    needed.

    The adapter removes the temporary directories that this function writes.
    """
    source, kind = config.model, _adapter_of(options)
    model, folder, is_plain = _model_in_directory(config, tokenizer)
    words = Path(tempfile.mkdtemp(prefix="penstock-tokenizer-"))
    tokenizer.save_pretrained(words)
    given = ModelFiles(
        path=folder, tokenizer=words, temporary=(words,) if is_plain else (words, folder), dtype=source.dtype,
        layout=layout_of(model.named_parameters()), vocab_size=model.get_output_embeddings().weight.shape[0],
        head_dim=_head_dim(model.config), max_length=options.max_length or model.config.max_position_embeddings,
        trusted=source.trust_remote_code, device=resolve_device(config.placement.device),
    )  # fmt: skip
    with building():  # a user's own class may load its model here
        return kind(
            given, options, settings, max_running=config.placement.max_running,
            stop_ids=stop_token_ids(tokenizer, model), detokenize=_detokenizer(tokenizer),
            threads=config.placement.rollout_threads,
        )  # fmt: skip


def _adapter_of(options: VllmConfig | VllmServerConfig | SglangConfig | ClassConfig) -> Callable[..., Engine]:
    """Import and return the adapter class. The import is lazy, because most workers lack the packages of external
    engines."""
    if isinstance(options, VllmConfig):
        from penstock.services.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine
    if isinstance(options, VllmServerConfig):
        from penstock.services.rollout.engines.vllm.server import VllmServerEngine

        return VllmServerEngine
    if isinstance(options, SglangConfig):
        from penstock.services.rollout.engines.sglang.engine import SglangEngine

        return SglangEngine
    found: Callable[..., Engine] = import_named(options.path, what="rollout.path", beside="rollout", error=ConfigError)
    return found


def _model_in_directory(
    config: TextJob | ServingJob, tokenizer: PreTrainedTokenizerFast
) -> tuple[PreTrainedModel, Path, bool]:
    """Return ``(model, directory to load it from, True if the job file names this directory)``.

    The model is on the meta device if ``model.path`` already is such a directory. A directory that the job
    file does not name is a temporary one that this function created.
    """
    source, folder = config.model, Path(config.model.path or "")
    if source.path is not None and (folder / "config.json").is_file():
        described = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
        with building(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, dtype=getattr(torch, source.dtype))
        if not (folder / COMMIT).is_file():
            return model, folder, True
        return model, weights_alone(folder), False
    model = build_model(source, len(tokenizer), seed=config.seed)
    folder = Path(tempfile.mkdtemp(prefix="penstock-model-"))
    model.save_pretrained(folder)
    return model, folder, False


def weights_alone(checkpoint: Path) -> Path:
    """Return a new temporary directory of symbolic links to the files of a checkpoint, without the optimizer state:
    engines load every safetensors file that they find."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-model-"))
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors" or file.name.startswith("model"):
            (folder / file.name).symlink_to(file.absolute())
    return folder


def _head_dim(config: PretrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _check_routers(model: PreTrainedModel, config: ModelConfig) -> None:
    plan = plan_of(model)
    if config.moe is None or plan is None:
        return
    if not plan.sparse:
        raise ConfigError(f"model.moe: {type(model).__name__} has no routers")
    wide = 1 if plan.sparse[0].router.weight.shape[0] <= 1 << 8 else 2
    nbytes = len(plan.sparse) * plan.sparse[0].top_k * wide
    if config.moe.router_replay and config.replay_bytes_per_token < nbytes:
        raise ConfigError(f"model.moe.replay_bytes_per_token: this model's router table takes {nbytes} bytes per token")
