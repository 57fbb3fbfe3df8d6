"""Decoding of groups: whatever breaks their format raises a ProtocolError, never another error."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.frame import encode_frame
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import GroupHeader, decode_group, group_headers, parse_group_header

TREE: dict[str, Any] = {
    "schema": SCHEMA, "kind": "Group", "job": "j", "draw": [0, 0], "attempt": "a", "epoch": 1, "meta": {}, "parts": {},
    "prompt_ids": np.zeros(1, np.int32), "token_ids": np.zeros(1, np.int32), "cu_seqlens": np.array([0, 1], np.int32),
    "logprobs": np.zeros(1, np.float32), "mask": np.ones(1, np.uint8), "rewards": np.zeros(1, np.float32),
    "failed": np.zeros(1, np.bool_), "finish": np.zeros(1, np.uint8), "spans": np.array([[0, 0, 0, 1]], np.int32),
    "greedy": np.zeros(1, np.bool_), "temperature": 1.0,
}  # fmt: skip
HEADER: dict[str, Any] = {
    "draw": Draw(0), "attempt": "a", "epoch": 1, "digest": "d", "nbytes": 1, "prompt_tokens": 1, "lengths": [1, 2],
    "rewards": [0.0, 1.0], "failed": [False, False], "truncated": [False, False], "finite": True, "min_version": 0,
    "max_version": 0, "worker": "w",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cu_seqlens", np.zeros((2, 2), np.int32)),
        ("cu_seqlens", np.zeros(0, np.int32)),
        ("cu_seqlens", np.zeros((), np.int32)),
        ("spans", np.zeros(4, np.int32)),
        ("token_ids", [1]),
        ("greedy", 3),
        ("experts", [1]),
        ("experts", np.zeros(2, np.uint8)),
        ("draw", ["0", 0]),
        ("draw", 7),
        ("meta", []),
        ("parts", {"exact": 1.0}),
        ("attempt", 1),
        ("temperature", 1),
        ("temperature", -0.5),
        ("temperature", float("nan")),
    ],
)
def test_a_malformed_field_is_a_protocol_error(field: str, value: Any) -> None:
    assert decode_group(b"".join(encode_frame(TREE))).draw == Draw(0)
    with pytest.raises(ProtocolError):
        decode_group(b"".join(encode_frame({**TREE, field: value})))


def test_a_header_of_an_earlier_version_names_no_source() -> None:
    header = GroupHeader(**HEADER, temperature=0.5, source="hard")
    assert parse_group_header(group_headers(header)) == header
    ((name, text),) = group_headers(header).items()
    earlier = json.dumps(json.loads(text)[:-3])
    assert parse_group_header({name: earlier}) == GroupHeader(**HEADER, temperature=0.5)


@pytest.mark.parametrize("field", ["lengths", "rewards", "failed", "truncated", "greedy", "succeeded"])
def test_lists_of_a_header_have_the_same_length(field: str) -> None:
    good = GroupHeader(**HEADER)
    assert parse_group_header(group_headers(good)) == good
    wrong = GroupHeader(**{**HEADER, field: HEADER.get(field, [False, True])[:1]})
    with pytest.raises(ProtocolError, match="entries each"):
        parse_group_header(group_headers(wrong))
