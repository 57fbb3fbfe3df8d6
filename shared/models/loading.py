"""Tokenizers and models of the job's ``model`` section: loaded from a directory, or built from a small architecture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import Float32Head
from penstock.shared.models.building import building
from penstock.shared.models.lora import without_adapter

__all__ = ["build_model", "build_tokenizer", "resolve_device", "stop_token_ids"]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3 of the `char` tokenizer."""
CHAR_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template of the `char` tokenizer, which has no roles: a chat is the text of its messages."""

_ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def build_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """Load or build the job's tokenizer; it always has a padding token.

    Raises:
        ConfigError: the path does not exist or contains no tokenizer.
    """
    source = config.tokenizer or config.path
    assert source is not None, "ModelConfig guarantees a tokenizer or a path"
    if source == "char":
        return _char_tokenizer(config.characters)
    _check_source(source, key="model.tokenizer" if config.tokenizer else "model.path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_load_args(source, config))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a tokenizer from '{source}': {_first_line(error)}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_model(config: ModelConfig, tokenizer_size: int, *, seed: int) -> PreTrainedModel:
    """Load or build the policy, in eval mode, on the CPU, with parameters of ``config.dtype``.

    Args:
        config: a directory (or hub id) of weights, or an architecture that is initialised at random.
        tokenizer_size: ``len(tokenizer)``; the embedding must have at least that many rows.
        seed: of the random initialisation; the global random state is restored.

    Raises:
        ConfigError: the path is missing or is not a causal language model, or the vocabulary is too small.
    """
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, config.dtype)
    if config.path is not None:
        model = _load(config.path, config, dtype)
    else:
        assert config.config is not None, "ModelConfig guarantees exactly one source"
        model = _initialise(config.config, tokenizer_size, dtype, seed)
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < tokenizer_size:
        raise ConfigError(
            f"the model has {rows} embeddings, the tokenizer has {tokenizer_size} tokens: they do not fit"
        )
    if config.fp32_head:
        _widen_head(model)
    return model.eval()


def _widen_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(f"model.fp32_head: the head of {type(model).__name__} is a {type(head).__name__}, not linear")
    head.__class__ = Float32Head  # the module object, its name and its weights do not change


def stop_token_ids(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel | None = None) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's end of sequence, and the tokens that the model's
    generation config names."""
    sources = [tokenizer.eos_token_id]
    if model is not None:
        sources += [model.generation_config.eos_token_id, model.config.eos_token_id]
    ids: set[int] = set()
    for source in sources:
        if source is not None:
            ids.update([source] if isinstance(source, int) else source)
    return tuple(sorted(ids))


def _char_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *dict.fromkeys(characters)))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAR_CHAT_TEMPLATE
    return tokenizer


def _initialise(
    architecture: ArchitectureConfig, tokenizer_size: int, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    vocab_size = architecture.vocab_size or tokenizer_size
    config_class = getattr(transformers, f"{_ARCHITECTURES[architecture.arch]}Config")
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.hidden_size // architecture.num_heads,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=architecture.tie_word_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **_experts(architecture),
    )
    with building(seed):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generation = model.generation_config
    generation.pad_token_id, generation.bos_token_id, generation.eos_token_id = 0, 1, 2
    return model


def _experts(architecture: ArchitectureConfig) -> dict[str, int | bool]:
    if architecture.experts is None:
        return {}
    return {
        "num_experts": architecture.experts.number,
        "num_experts_per_tok": architecture.experts.per_token,
        "norm_topk_prob": architecture.experts.normalise,
        "moe_intermediate_size": architecture.intermediate_size,
    }


def _load(path: str, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    _check_source(path, key="model.path")
    adapted = (Path(path) / "adapter_config.json").is_file()
    if Path(path).is_dir() and not adapted and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path '{path}' has no config.json: it is not a Hugging Face model directory")
    args = _load_args(path, config)
    try:
        if adapted:
            return _load_adapted(path, dtype, args)
        described = AutoConfig.from_pretrained(path, **args)
        with building():
            return AutoModelForCausalLM.from_pretrained(path, config=described, dtype=dtype, **args)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a causal language model from '{path}': {_first_line(error)}") from None


def _load_adapted(path: str, dtype: torch.dtype, args: dict[str, bool]) -> PreTrainedModel:
    """Load the base model of a directory with an adapter, and merge the adapter into the model's weights."""
    if importlib.util.find_spec("peft") is None:  # without peft, transformers would ignore the adapter silently
        raise ConfigError(f"model.path '{path}' holds an adapter and needs the package 'peft': install penstock[lora]")
    with building():
        return without_adapter(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **args))


def _check_source(source: str, *, key: str) -> None:
    if not Path(source).exists() and not _HUB_ID.fullmatch(source):
        raise ConfigError(f"{key} '{source}' does not exist on this host; every service reads the same path")


def _load_args(source: str, config: ModelConfig) -> dict[str, bool]:
    return {"local_files_only": Path(source).is_dir(), "trust_remote_code": config.trust_remote_code}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def resolve_device(name: str) -> str:
    """Convert `auto`, `cpu` or `cuda` to a torch device.

    Raises:
        ConfigError: `cuda` was requested and torch finds no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("placement.device: torch sees no GPU here; use 'cpu' or 'auto'")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
