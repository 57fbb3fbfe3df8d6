"""Encoding and decoding of groups of episodes, and the header that the gate reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from penstock.services.coordinator.queries.audit import Audit, audit_group
from penstock.services.coordinator.queries.samples import sample_detail, sample_rows
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.embodied.episode_group import (
    EpisodeGroup,
    decode_any_group,
    decode_episode_group,
    encode_episode_group,
)
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import (
    GROUP_HEADER,
    GroupHeader,
    decode_group,
    group_headers,
    parse_group_header,
)

EARLIER = (
    '[[7,1],"a",3,"659c80b9073c03b4fa4276da6bca81ea",2176,0,[3,2],[0.5648737549781799,0.2819242477416992],'
    '[false,false],[true,false],true,4,5,"w","","",[],"policy",null,"",[[4,"w4"],[5,"w5"]]]'
)
"""Header of the group below as versions before the field ``succeeded`` wrote it."""


def group(lengths: tuple[int, ...] = (3, 2), *, chunk: int = 2, **changes: Any) -> EpisodeGroup:
    """Return episodes of ``lengths`` decisions; the first episode is truncated, the others terminate."""
    rng = np.random.default_rng(0)
    d, g = sum(lengths), len(lengths)
    cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    terminated, truncated = np.zeros((d, chunk), np.bool_), np.zeros((d, chunk), np.bool_)
    for index, end in enumerate(cuts[1:]):
        (truncated if index == 0 else terminated)[end - 1, -1] = True
    rewards = rng.normal(size=(d, chunk)).astype(np.float32)
    known: dict[str, Any] = {
        "job": "job_1", "draw": Draw(7, 1), "attempt": "a", "epoch": 3, "cu_seqlens": cuts,
        "observations": {"state": rng.normal(size=(d, 5))}, "final_observations": {"state": rng.normal(size=(g, 5))},
        "actions": rng.normal(size=(d, chunk, 4)).astype(np.float32),
        "logprobs": rng.normal(size=(d, chunk, 4)).astype(np.float32),
        "valid": np.full(d, chunk, np.int32), "rewards": rewards, "terminated": terminated, "truncated": truncated,
        "returns": np.add.reduceat(rewards.sum(1), cuts[:-1]).astype(np.float32),
        "succeeded": np.array([False, True][:g]), "solved_at_end": np.array([False, True][:g]),
        "failed": np.zeros(g, np.bool_), "reset_id": 7, "state_hashes": np.full(g, 11, np.uint64),
        "spans": np.array([[0, 4, 0, 2], [0, 5, 2, 3], [1, 5, 0, 2]], np.int32), "weights": ("w4", "w5", "w5"),
        "extras": {"step": np.arange(d)}, "meta": {"task": "reach", "worker": "w"},
    }  # fmt: skip
    return EpisodeGroup(**known | changes)


def test_a_decoded_group_equals_the_encoded_one() -> None:
    sent = group()
    data, header = encode_episode_group(sent)
    found = decode_any_group(data)
    assert isinstance(found, EpisodeGroup)
    for field in dataclasses.fields(EpisodeGroup):
        before, after = getattr(sent, field.name), getattr(found, field.name)
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype
            np.testing.assert_array_equal(before, after)
        elif field.name in ("observations", "final_observations", "extras"):
            assert before.keys() == after.keys()
            for name in before:
                np.testing.assert_array_equal(before[name], after[name])
        else:
            assert before == after
    assert header.digest == xxhash.xxh3_128_hexdigest(data)
    assert header.nbytes == len(data)


def test_the_gate_reads_decisions_and_returns() -> None:
    _, header = encode_episode_group(group())
    assert header.lengths == [3, 2]
    assert header.rewards == group().returns.tolist()
    assert header.truncated == [True, False]
    assert (header.min_version, header.max_version) == (4, 5)
    assert header.weights == [(4, "w4"), (5, "w5")]
    assert header.finite
    assert header.counted == [0, 1]
    assert header.has_signal
    assert header.succeeded == [False, True]


def test_headers_with_and_without_successes_are_readable() -> None:
    """Old code reads new headers, and new code old ones; the bytes and the digest of the group are the same."""
    _, header = encode_episode_group(group())
    sent = group_headers(header)
    assert parse_group_header(sent) == header
    assert parse_group_header({GROUP_HEADER: EARLIER}) == msgspec.structs.replace(header, succeeded=[])
    names = [field.name for field in msgspec.structs.fields(GroupHeader)]
    old_code = msgspec.defstruct("Earlier", names[: names.index("succeeded")], array_like=True)
    earlier = msgspec.json.decode(sent[GROUP_HEADER], type=old_code)
    assert msgspec.json.encode(earlier).decode() == EARLIER


@pytest.mark.parametrize("name", ["observations", "final_observations", "rewards", "logprobs"])
def test_the_header_flags_a_number_that_is_not_finite(name: str) -> None:
    sent = group()
    array = getattr(sent, name)
    (array["state"] if isinstance(array, dict) else array)[0, 0] = np.nan
    assert not encode_episode_group(sent)[1].finite


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": np.array([0, 3, 4], np.int32)}, "do not cut 5 decisions"),
        ({"valid": np.array([2, 2, 2, 0, 2], np.int32)}, "executes 1 to 2 actions"),
        ({"rewards": np.zeros((5, 3), np.float32)}, "'rewards' is not"),
        ({"logprobs": np.zeros((5, 2, 1), np.float32)}, "log-probs"),
        ({"returns": np.zeros(3, np.float32)}, "'returns' has 3 rows for 2"),
        ({"final_observations": {"image": np.zeros((2, 5))}}, "other names"),
        ({"actions": np.zeros((5, 2, 4), np.float64)}, "float32 or int64"),
        ({"spans": np.array([[0, 4, 0, 3]], np.int32), "weights": ()}, "do not cover every decision"),
        ({"spans": np.array([[0, 4, 0, 2], [0, 5, 3, 3]], np.int32), "weights": ()}, "episode 0 in order"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        encode_episode_group(group(**changes))


def test_groups_of_tokens_and_of_episodes_are_not_confused() -> None:
    data, _ = encode_episode_group(group())
    with pytest.raises(ProtocolError, match="not a group of a known schema"):
        decode_group(data)
    with pytest.raises(ProtocolError, match="not a group of episodes"):
        decode_episode_group(data.replace(b"EpisodeGroup", b"EpisodeGrouq"))


def test_a_failed_group_has_no_episodes() -> None:
    empty = np.zeros(0, np.float32)
    flags = np.zeros(0, np.bool_)
    sent = group(
        (), observations={}, final_observations={}, extras={}, spans=np.zeros((0, 4), np.int32), weights=(),
        returns=empty, succeeded=flags, solved_at_end=flags, failed=flags, state_hashes=np.zeros(0, np.uint64),
        meta={"error": "the simulator died"},
    )  # fmt: skip
    _, header = encode_episode_group(sent)
    assert (header.lengths, header.succeeded, header.error) == ([], [], "the simulator died")


def test_episodes_are_shown_and_audited_like_completions() -> None:
    sent = group()
    _, header = encode_episode_group(sent)
    first, second = sample_rows(3, [sent])
    assert (first["id"], first["finish"], first["tokens"], first["steps"]) == ("3-7.1-0", "length", 3, 6)
    assert (second["finish"], second["success"], second["reset_id"]) == ("stop", True, 7)
    assert first["advantage"] == pytest.approx(-second["advantage"])
    detail = sample_detail(3, sent, 1)
    assert detail["siblings"] == ["3-7.1-0"]
    assert np.shape(detail["observations"]["state"]) == (2, 5)
    sealed = SealedGroup(
        draw=sent.draw, seq=1, digest=header.digest, attempt="a", tokens=5, min_version=4, max_version=5,
        rewards=header.rewards, worker="w",
    )  # fmt: skip
    audit = Audit()
    audit_group(audit, 1, sealed, sent, header.digest)
    assert (audit.tokens_checked, audit.report()["ok"]) == (5, True)
    audit_group(audit, 1, sealed, dataclasses.replace(sent, attempt="b"), header.digest)
    assert not audit.report()["ok"]
