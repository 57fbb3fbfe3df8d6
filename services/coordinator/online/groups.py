"""From admitted turns, or from material in feedback, to a group as workers would have made it. Pure.

Shapes: N tokens after the first prompt, P prompt tokens, S version spans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.interaction import Feedback, Interaction
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.reading import ReadReply
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group

__all__ = ["gone_group", "group_of", "made_group", "turn_of"]

WORKER = "online"
"""Stands where the name of a worker does."""


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
    """The turns as one trajectory: the first prompt, then what the policy said and, masked, what it was told between.

    Tokens that the policy did not choose belong to the version that read them: the next turn's first one. Their
    log-probs are 0 and never used. The attempt follows from the draw, so every leader makes the same group.

    ``temperature``: at which it is trained; None: at that of its turns, which they share.
    """
    prompt, tokens, mask = list(turns[0].prompt_ids), list[int](), list[int]()
    logprobs, spans, weights = list[float](), list[list[int]](), list[str]()
    for turn in turns:
        told = turn.prompt_ids[len(prompt) + len(tokens) :]
        if told:
            spans.append([0, turn.spans[0].version, len(tokens), len(tokens) + len(told)])
            weights.append(turn.spans[0].weights)
            tokens += told
            logprobs += [0.0] * len(told)
            mask += [0] * len(told)
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
            "prompt": turns[0].prompt, "completions": [turn.text for turn in turns[-1:]], **_said(turns),
        },
    )  # fmt: skip


def _said(turns: Sequence[Interaction]) -> dict[str, list[str]]:
    """All that was said after the first prompt, where there were several turns and their prompts are stored."""
    first, last = turns[0].prompt, turns[-1]
    if len(turns) == 1 or not first or not last.prompt.startswith(first):
        return {}
    return {"transcripts": [last.prompt[len(first) :] + last.text]}


def made_group(
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
    """Answers to one prompt that were not sampled for this draw: one, or the better and the worse of two.

    Args:
        logprobs: of the only answer's tokens; None: 0, for a loss that uses none, or to be ``assumed``.
        version: that sampled them; below 0: none is known, and 0 stands for it.
        temperature: at which they were sampled, or, where that does not matter, at which they are trained.
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
    """A posted answer as if it had been served here; ``read``: its tokens."""
    return Interaction(
        id=item.id, request=item.id, index=0, job=item.job, episode=item.episode, key_id=item.key_id, user=item.user,
        split="train", untrainable="", prompt_ids=read.prompt_ids, token_ids=read.token_ids, logprobs=list(logprobs),
        spans=[Span(version, 0, len(read.token_ids))], finish="stop", template="", body_digest="", text=read.text,
        prompt=read.prompt,
        sampling=Sampling(max_new_tokens=len(read.token_ids), temperature=temperature),
        started=item.received, first_token=item.received, ended=item.received,
    )  # fmt: skip


def gone_group(job: str, draw: Draw, *, epoch: int, reason: str) -> Group:
    """What stands for a draw whose interactions do not exist any more: it is dropped for ``reason``."""
    empty = np.zeros(0, np.int32)
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch, prompt_ids=empty, token_ids=empty,
        cu_seqlens=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32), mask=np.zeros(0, np.uint8),
        rewards=np.zeros(0, np.float32), failed=np.zeros(0, np.bool_), finish=np.zeros(0, np.uint8),
        spans=np.zeros((0, 4), np.int32), meta={"worker": WORKER, "skipped": reason},
    )  # fmt: skip
