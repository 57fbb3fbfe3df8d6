"""Models and tokenizers from the ``model`` section; mistakes in it are named clearly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models import build_model, build_tokenizer, stop_token_ids, supports

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


def config_of(**architecture: object) -> ModelConfig:
    return ModelConfig(config=ArchitectureConfig(**{**SMALL, **architecture}), tokenizer="char", characters="0123+=\n+")


def test_one_token_per_character() -> None:
    tokenizer = build_tokenizer(config_of())
    assert len(tokenizer) == 4 + 7
    assert tokenizer("12+3=\n\n").input_ids == [5, 6, 8, 7, 9, 10, 10]
    assert tokenizer.decode(tokenizer("12+3=\n").input_ids) == "12+3=\n"
    assert tokenizer("1x").input_ids == [5, 3]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]


def test_a_chat_of_a_character_model_is_its_text() -> None:
    tokenizer = build_tokenizer(config_of())
    messages = [{"role": "system", "content": "0"}, {"role": "user", "content": "1+2="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "01+2="


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_weights_depend_on_the_seed_alone(arch: str) -> None:
    experts = {"experts": {"number": 4, "per_token": 2}} if arch == "qwen3_moe" else {}
    config = config_of(arch=arch, **experts)
    state = torch.get_rng_state()
    first, again, other = (build_model(config, 11, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(first.parameters(), again.parameters(), other.parameters(), strict=True)
    differ = [not torch.equal(a, c) for a, b, c in pairs if torch.equal(a, b)]
    assert len(differ) == len(list(first.parameters()))
    assert any(differ)
    assert supports(first)
    assert not first.training
    assert first.config.vocab_size == 11
    assert stop_token_ids(build_tokenizer(config), first) == (2,)


def test_bfloat16_keeps_the_rotary_frequencies() -> None:
    exact = build_model(config_of(), 11, seed=0)
    short = build_model(config_of().model_copy(update={"dtype": "bfloat16"}), 11, seed=0)
    assert {parameter.dtype for parameter in short.parameters()} == {torch.bfloat16}
    assert torch.equal(short.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


def test_a_saved_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    built = build_model(config_of(vocab_size=32), 11, seed=5)
    built.generation_config.eos_token_id = [2, 3]
    built.save_pretrained(tmp_path)
    build_tokenizer(config_of()).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    tokenizer = build_tokenizer(config)
    loaded = build_model(config, len(tokenizer), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), loaded.parameters(), strict=True))
    assert tokenizer("12+3=").input_ids == [5, 6, 8, 7, 9]
    assert stop_token_ids(tokenizer) == (2,)
    assert stop_token_ids(tokenizer, loaded) == (2, 3)


def test_threads_that_load_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    """transformers replaces functions of torch while it loads; two loads at once could leave them replaced for good."""
    saved = build_model(config_of(vocab_size=32), 11, seed=5)
    saved.save_pretrained(tmp_path)
    random = config_of(arch="llama", vocab_size=32)
    expected = build_model(random, 11, seed=7)
    stored = ModelConfig(path=str(tmp_path), tokenizer="char", characters="0123")

    def build(number: int) -> bool:
        found, wanted = (
            (build_model(stored, 8, seed=0), saved) if number % 2 else (build_model(random, 11, seed=7), expected)
        )
        return all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(build, range(48)))
    assert all(map(build, range(2)))


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 embeddings"):
        build_model(config_of(vocab_size=8), 11, seed=0)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path / "nowhere"))
    for build in (lambda: build_model(config, 1, seed=0), lambda: build_tokenizer(config)):
        with pytest.raises(ConfigError, match="nowhere' does not exist"):
            build()


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        build_model(config, 1, seed=0)
    with pytest.raises(ConfigError, match="tokenizer"):
        build_tokenizer(config)


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        build_model(ModelConfig(path=str(tmp_path)), 1, seed=0)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    build_model(config_of(), 11, seed=0).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load"):
        build_model(ModelConfig(path=str(tmp_path)), 11, seed=0)
