"""A group's completions go to the scorers in messages that fit, and their scores come back in order."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.services.rollout.session import TEXT_BYTES, joined, score_requests
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, pack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import JUDGEMENTS, ScoreReply
from penstock.shared.protocol.trajectory import Group


def group(*texts: str) -> Group:
    zeros = np.zeros(len(texts), np.float32)
    return Group(
        job="job_x", draw=Draw(0), attempt="a", epoch=1, prompt_ids=np.ones(1, np.int32),
        token_ids=np.zeros(0, np.int32), cu_seqlens=np.zeros(len(texts) + 1, np.int32),
        logprobs=np.zeros(0, np.float32), mask=np.zeros(0, np.uint8), rewards=zeros, failed=zeros > 0,
        finish=np.zeros(len(texts), np.uint8), spans=np.zeros((0, 4), np.int32),
        meta={"prompt": "p", "answer": "4", "row": {"id": 7}, "completions": list(texts)},
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 1000, TEXT_BYTES // 2 + 1, TEXT_BYTES])
def test_requests_fit_and_keep_the_order(size: int) -> None:
    texts = [f"{i:03d}" + "é" * (size // 2) for i in range(9)]
    requests = score_requests(group(*texts))
    assert [text for request in requests for text in request.completions] == texts
    assert all(request.completions for request in requests)
    assert max(len(pack(request, job="job_x", id="a.0")) for request in requests) <= MAX_INLINE_BYTES
    assert {(request.prompt, request.answer, request.row["id"]) for request in requests} == {("p", "4", 7)}
    assert (len(requests) == 1) == (size < 2000)


def test_the_judgement_of_an_environment_goes_with_its_completion() -> None:
    texts = [f"{i}" + "a" * (TEXT_BYTES // 2) for i in range(5)]
    whole = group(*texts)
    whole.meta["row"][JUDGEMENTS] = [float(i) for i in range(5)]
    requests = score_requests(whole)
    assert len(requests) > 1
    assert [request.row[JUDGEMENTS] for request in requests] == [
        [float(text[0]) for text in request.completions] for request in requests
    ]
    assert len(whole.meta["row"][JUDGEMENTS]) == 5


def test_replies_are_joined() -> None:
    replies = [
        ScoreReply(rewards=[1.0, 0.0], failed=[False, True], parts={"exact": [1.0, 0.0]}, errors=["broke"]),
        ScoreReply(rewards=[0.5], failed=[False], parts={"exact": [0.0], "format": [0.5]}, errors=[]),
    ]
    reply = joined(replies)
    assert (reply.rewards, reply.failed, reply.errors) == ([1.0, 0.0, 0.5], [False, True, False], ["broke"])
    assert reply.parts == {"exact": [1.0, 0.0, 0.0], "format": [0.0, 0.0, 0.5]}
