"""Policy model: loading, packing of ragged sequences, and the decoder shared by trainer and sampler."""

from penstock.shared.models.decoder import hidden_states, selected_logprobs, supports
from penstock.shared.models.loading import build_model, build_tokenizer, stop_token_ids
from penstock.shared.models.packed import PackedTokens, pack

__all__ = [
    "PackedTokens",
    "build_model",
    "build_tokenizer",
    "hidden_states",
    "pack",
    "selected_logprobs",
    "stop_token_ids",
    "supports",
]
