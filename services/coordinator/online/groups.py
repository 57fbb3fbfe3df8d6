"""Builds groups from admitted turns and from off-policy examples, in the form in which workers publish them. Pure.

Shapes: N tokens after the first prompt, P prompt tokens, S version spans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.reading import ReadReply
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group

__all__ = ["empty_group", "example_group", "group_of", "turn_of"]

WORKER = "online"
"""Worker name of groups that the leader makes."""


def group_of(
    job: str,
    draw: Draw,
    turns: Sequence[Interaction],
    *,
    reward: float,
    epoch: int,
    objective: Objective = "policy",
    temperature: float | None = None,
) -> Group:
    """Build one trajectory from turns: the first prompt, then sampled tokens and, masked, the context between them.

    Context tokens belong to the version that read them: the first one of the next turn. Their log-probs are 0 and never
    used. The attempt follows from the draw, so every leader makes the same group.

    ``temperature``: training temperature; None is that of the turns, which share one.
    """
    prompt, tokens, mask = list(turns[0].prompt_ids), list[int](), list[int]()
    logprobs, spans, weights = list[float](), list[list[int]](), list[str]()
    for turn in turns:
        context = turn.prompt_ids[len(prompt) + len(tokens) :]
        if context:
            spans.append([0, turn.spans[0].version, len(tokens), len(tokens) + len(context)])
            weights.append(turn.spans[0].weights)
            tokens += context
            logprobs += [0.0] * len(context)
            mask += [0] * len(context)
        start = len(tokens)
        spans += [[0, span.version, start + span.start, start + span.end] for span in turn.spans]
        weights += [span.weights for span in turn.spans]
        tokens += turn.token_ids
        logprobs += turn.logprobs
        mask += [1] * len(turn.token_ids)
    last = turns[-1]
    finish = "length" if last.finish == "length" else "stop"
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch,
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        cu_seqlens=np.array([0, len(tokens)], np.int32),
        logprobs=np.minimum(np.array(logprobs, np.float32), 0.0),
        mask=np.array(mask, np.uint8),
        rewards=np.array([reward], np.float32),
        failed=np.zeros(1, np.bool_),
        finish=np.array([FINISH_REASONS.index(finish)], np.uint8),
        spans=np.array(spans, np.int32).reshape(-1, 4),
        weights=tuple(weights),
        objective=objective,
        temperature=turns[0].sampling.temperature if temperature is None else temperature,
        parts={"feedback": np.array([reward], np.float32)},
        meta={
            "worker": WORKER, "episode": last.episode, "interactions": [turn.id for turn in turns],
            "prompt": turns[0].prompt, "completions": [turn.text for turn in turns[-1:]], **_transcripts(turns),
        },
    )  # fmt: skip


def _transcripts(turns: Sequence[Interaction]) -> dict[str, list[str]]:
    """Return the text after the first prompt if there are several turns with stored prompts."""
    first, last = turns[0].prompt, turns[-1]
    if len(turns) == 1 or not first or not last.prompt.startswith(first):
        return {}
    return {"transcripts": [last.prompt[len(first) :] + last.text]}


def example_group(
    job: str,
    draw: Draw,
    prompt_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
    *,
    objective: Objective,
    reward: float,
    epoch: int,
    logprobs: Sequence[float] | None = None,
    version: int = -1,
    prompt: str = "",
    texts: Sequence[str] = (),
    assumed: bool = False,
    temperature: float = 1.0,
) -> Group:
    """Build the group of answers that were not sampled for this draw: one answer, or the better and the worse of two.

    Args:
        logprobs: those of a single answer; None stores 0, for a loss without log-probs or with ``assumed`` ones.
        version: version that sampled the answers; 0 replaces an unknown one (below 0).
        temperature: sampling temperature, or, where that does not matter, the training temperature.
    """
    lengths = [len(answer) for answer in answers]
    tokens = [token for answer in answers for token in answer]
    spans = [[place, max(0, version), 0, length] for place, length in enumerate(lengths)]
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch,
        prompt_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(tokens, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        logprobs=np.minimum(np.array([0.0] * len(tokens) if logprobs is None else logprobs, np.float32), 0.0),
        mask=np.ones(len(tokens), np.uint8),
        rewards=np.full(len(answers), reward, np.float32),
        failed=np.zeros(len(answers), np.bool_),
        finish=np.full(len(answers), FINISH_REASONS.index("stop"), np.uint8),
        spans=np.array(spans, np.int32).reshape(-1, 4),
        objective=objective,
        assumed=assumed,
        temperature=temperature,
        meta={"worker": WORKER, "prompt": prompt, "completions": list(texts) or [""] * len(answers)},
    )  # fmt: skip


def turn_of(
    item: Feedback, read: ReadReply, logprobs: Sequence[float], *, version: int, temperature: float
) -> Interaction:
    """Build the interaction that a posted answer would be if the gateway had served it; ``read`` has its tokens."""
    return Interaction(
        id=item.id, request=item.id, index=0, job=item.job, episode=item.episode, key_id=item.key_id, user=item.user,
        split="train", untrainable="", prompt_ids=read.prompt_ids, token_ids=read.token_ids, logprobs=list(logprobs),
        spans=[Span(version, 0, len(read.token_ids))], finish="stop", template="", body_digest="", text=read.text,
        prompt=read.prompt,
        sampling=Sampling(max_new_tokens=len(read.token_ids), temperature=temperature),
        started=item.received, first_token=item.received, ended=item.received,
    )  # fmt: skip


def empty_group(job: str, draw: Draw, *, epoch: int, reason: str) -> Group:
    """Build the group of a draw whose interactions are gone; the gate drops it for ``reason``."""
    empty = np.zeros(0, np.int32)
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch, prompt_ids=empty, token_ids=empty,
        cu_seqlens=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32), mask=np.zeros(0, np.uint8),
        rewards=np.zeros(0, np.float32), failed=np.zeros(0, np.bool_), finish=np.zeros(0, np.uint8),
        spans=np.zeros((0, 4), np.int32), meta={"worker": WORKER, "skipped": reason},
    )  # fmt: skip
