"""A rollout worker reads tokens that were posted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.services.rollout.conversations.rendering import Renderer
from penstock.services.rollout.held_weights import WeightRing
from penstock.services.rollout.serving.reading import Reader
from penstock.shared.config.model import ModelConfig
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.live.reading import ReadReply, ReadRequest

TOKENIZER = build_tokenizer(ModelConfig.parse({"config": {}, "tokenizer": "char"}))
RENDERER = Renderer(TOKENIZER, {})


@pytest.mark.parametrize(
    ("fields", "flaw"),
    [
        ({}, ""),
        ({"template": RENDERER.digest}, ""),
        ({"template": "of another tokenizer"}, "other_tokenizer"),
        ({"token_ids": [1 << 20]}, "unknown_tokens"),
        ({"token_ids": []}, "no_tokens"),
        ({"token_ids": [5] * 64}, "completion_too_long"),
    ],
)
async def test_posted_tokens_are_checked_against_the_model(fields: dict[str, Any], flaw: str) -> None:
    engine: Any = SimpleNamespace(max_length=16)
    request = ReadRequest(**{"prompt_ids": [4, 5], "token_ids": [6, 7], **fields})
    reply, _ = unpack(
        await Reader("j", RENDERER, TOKENIZER, engine, WeightRing(0)).read(pack(request, job="j")), ReadReply
    )
    assert reply.flaw == flaw
