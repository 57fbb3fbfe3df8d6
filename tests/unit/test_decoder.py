"""The functional decoder against the forward of the Hugging Face module: values, gradients, ragged packing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.shared.config.rollout import EmbeddedConfig, TransformersConfig, check_decoder
from penstock.shared.errors import ConfigError
from penstock.shared.models import decoder, hidden_states, pack, selected_logprobs, supports

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SUPPORTED = {
    "llama": LlamaConfig(**SIZE),
    "llama-biased": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(**SIZE, rope_parameters=LLAMA3),
    "linear-rope": LlamaConfig(**SIZE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "qwen2": Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZE),
    "one-group": Qwen3Config(**{**SIZE, "num_key_value_heads": 4}),
    "qwen3-moe": Qwen3MoeConfig(**SIZE, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-with-a-dense-layer": Qwen3MoeConfig(**SIZE, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**SIZE, num_local_experts=3, num_experts_per_tok=2),
}
FOREIGN = {
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "sliding": Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "gelu": LlamaConfig(**SIZE, hidden_act="gelu"),
    "sliding-experts": MixtralConfig(**SIZE, num_local_experts=3, num_experts_per_tok=2, sliding_window=4),
    "dynamic-rope": LlamaConfig(**SIZE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let torch use one thread: several threads compute such small tensors more slowly."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms, too, differ from their defaults
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def ragged(num: int = 9, longest: int = 40) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return sequences, all flat positions that score a next token, and those tokens, some of them padding tokens."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 61, n).tolist() for n in [1, longest, *rng.integers(2, longest, num - 2)]]
    starts = np.cumsum([0, *map(len, sequences)])
    select = [start + i for start, s in zip(starts, sequences, strict=False) for i in range(len(s) - 1)]
    targets = [token for s in sequences for token in s[1:]]
    return sequences, torch.tensor(select), torch.tensor(targets)


def by_module(model: PreTrainedModel, sequences: list[list[int]], temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies that the module itself computes, one sequence at a time."""
    logprobs, entropies = [], []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        logprobs_LV = torch.log_softmax(model(ids).logits[0, :-1].float() / (temperature or 1.0), -1)
        logprobs.append(logprobs_LV.gather(-1, ids[0, 1:, None])[:, 0])
        entropies.append(-(logprobs_LV.exp() * logprobs_LV).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("name", [*SUPPORTED, *FOREIGN])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_values_and_gradients_are_those_of_the_module(name: str, temperature: float) -> None:
    model = model_of({**SUPPORTED, **FOREIGN}[name])
    assert supports(model) is (name in SUPPORTED)
    sequences, select_M, targets_M = ragged()
    found, entropy = selected_logprobs(
        model, pack(sequences), select_M, targets_M, temperature=temperature, entropy=True
    )
    expected, expected_entropy = by_module(model, sequences, temperature)
    assert entropy is not None
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    weight_M = torch.randn(len(select_M), generator=torch.Generator().manual_seed(1))
    ours = gradients(model, (found * weight_M).sum() + entropy.sum())
    theirs = gradients(model, (expected * weight_M).sum() + expected_entropy.sum())
    for parameter, expected_gradient in theirs.items():
        scale = float(expected_gradient.abs().max())
        torch.testing.assert_close(ours[parameter], expected_gradient, atol=1e-5 * scale + 1e-7, rtol=1e-4)


@pytest.mark.parametrize("name", [*SUPPORTED, *FOREIGN])
def test_the_config_of_a_model_shows_whether_the_decoder_knows_it(name: str) -> None:
    """The coordinator, which has no torch, refuses jobs of the embedded engine by what config.json holds."""
    described = json.loads({**SUPPORTED, **FOREIGN}[name].to_json_string())
    check_decoder(TransformersConfig(), described, "config.json")
    if name in SUPPORTED:
        check_decoder(EmbeddedConfig(), described, "config.json")
        return
    with pytest.raises(ConfigError, match=r"config\.json has .*; rollout\.engine: transformers runs any"):
        check_decoder(EmbeddedConfig(), described, "config.json")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_blocks_of_similar_length_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(SUPPORTED[name])
    tokens = pack(ragged(num=23)[0])
    with torch.no_grad():
        whole = hidden_states(model, tokens)
        monkeypatch.setattr(decoder, "BLOCK_TOKENS", 64)
        torch.testing.assert_close(hidden_states(model, tokens), whole, atol=1e-5, rtol=0)


def test_blocks_hold_every_sequence_once_and_pad_little() -> None:
    tokens = pack(ragged(num=40, longest=64)[0])
    blocks, place_T = tokens.blocks(256)
    assert sorted(n for block in blocks for n in block.lengths) == sorted(tokens.lengths)
    assert all(a.max_seqlen <= min(b.lengths) for a, b in pairwise(blocks))
    joined = torch.cat([block.token_ids_T for block in blocks])
    assert torch.equal(joined[place_T], tokens.token_ids_T)
    positions = torch.cat([block.position_ids_T for block in blocks])
    assert torch.equal(positions[place_T], tokens.position_ids_T)
    assert max(block.num_tokens for block in blocks) <= 256 + 64


@pytest.mark.parametrize("length", [5, 300])
def test_one_sequence_is_one_block(length: int) -> None:
    tokens = pack([list(range(length))])
    blocks, place_T = tokens.blocks(100)
    assert [block.lengths for block in blocks] == [(length,)]
    assert torch.equal(place_T, torch.arange(length))


def test_large_vocabularies_are_scored_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(SUPPORTED["qwen2"])
    sequences, select_M, targets_M = ragged()

    def score() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, entropy = selected_logprobs(
            model, pack(sequences), select_M, targets_M, temperature=0.9, entropy=True
        )
        assert entropy is not None
        return logprobs, entropy, gradients(model, logprobs.sum() + 0.5 * entropy.sum())

    whole = score()
    monkeypatch.setattr(decoder, "MAX_LOGITS", 61 * 7)
    parts = score()
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_the_head_sees_selected_positions_only() -> None:
    model = model_of(SUPPORTED["llama"])
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[0]))
    tokens = pack([[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    logprobs, entropy = selected_logprobs(
        model, tokens, torch.tensor([3, 4, 7]), torch.tensor([5, 6, 9]), temperature=1.0, entropy=False
    )
    assert seen == [3]
    assert logprobs.shape == (3,)
    assert entropy is None


def test_no_sequence_sees_another() -> None:
    model = model_of(SUPPORTED["qwen3"])
    with torch.no_grad():
        together = hidden_states(model, pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]]))
        alone = hidden_states(model, pack([[4, 5]]))
    torch.testing.assert_close(together[3:5], alone, atol=1e-6, rtol=0)


def test_the_weights_are_used_by_reference() -> None:
    model = model_of(SUPPORTED["qwen3"])
    tokens = pack([[1, 2, 3]])
    with torch.no_grad():
        before = hidden_states(model, tokens)
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
        after = hidden_states(model, tokens)
        expected = model.model(torch.tensor([[1, 2, 3]])).last_hidden_state[0]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=0)


def test_pack_refuses_an_empty_list_and_empty_sequences() -> None:
    for bad in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one sequence"):
            pack(bad)


def test_pack_describes_the_sequences() -> None:
    tokens = pack([[5, 6], np.array([7]), (8, 9, 10)])
    assert tokens.token_ids_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert tokens.position_ids_T.tolist() == [0, 1, 0, 0, 1, 2]
    assert tokens.cu_seqlens_S1.tolist() == [0, 2, 3, 6]
    assert (tokens.lengths, tokens.max_seqlen, tokens.num_tokens) == ((2, 1, 3), 3, 6)
