"""Score requests about a group, each small enough for a message. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.messages import ScoreReply, ScoreRequest, row_for
from penstock.shared.protocol.trajectory import Group

__all__ = ["joined", "score_requests"]

TEXT_BYTES = MAX_INLINE_BYTES // 2
"""Texts of one request; the rest of the message is for the prompt and its row."""


def score_requests(group: Group) -> list[ScoreRequest]:
    """Requests for all completions of a group, in order."""
    meta, nbytes = group.meta, 0
    chunks: list[list[str]] = [[]]
    for text in meta["completions"]:
        size = len(text.encode())
        if chunks[-1] and nbytes + size > TEXT_BYTES:
            chunks.append([])
            nbytes = 0
        chunks[-1].append(text)
        nbytes += size
    requests, start = [], 0
    for chunk in chunks:
        row = row_for(meta["row"], range(start, start + len(chunk)))
        requests.append(ScoreRequest(prompt=meta["prompt"], completions=chunk, answer=meta["answer"], row=row))
        start += len(chunk)
    return requests


def joined(replies: Sequence[ScoreReply]) -> ScoreReply:
    """One reply for all completions; a component that a chunk did not score is 0 there."""
    names = dict.fromkeys(name for reply in replies for name in reply.parts)
    return ScoreReply(
        rewards=[reward for reply in replies for reward in reply.rewards],
        failed=[failed for reply in replies for failed in reply.failed],
        parts={
            name: [x for reply in replies for x in reply.parts.get(name, [0.0] * len(reply.rewards))] for name in names
        },
        errors=[error for reply in replies for error in reply.errors],
    )
