"""Conversion of a prompt and an engine's completions to a group. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.sampling import SamplingConfig
from penstock.shared.data.prompts import Prompt
from penstock.shared.protocol.generation import Sample, Sampling
from penstock.shared.protocol.ids import Draw, derive_seed, new_attempt
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group

__all__ = [
    "build_group",
    "completion_texts",
    "failed_group",
    "group_experts",
    "requests_for",
    "skipped_group",
]


def group_experts(samples: Sequence[Sample], num_prompt: int) -> NDArray[Any] | None:
    """Return the experts of the prompt and then of every completion, concatenated; None if none were recorded.

    Completions share the prompt's rows, which come from the first sample. The last token of a completion passes through
    no layer and has a row of zeros, as have all tokens of a completion without recorded experts.
    """
    recorded = [sample.experts for sample in samples if sample.experts is not None]
    if not recorded:
        return None
    empty = np.zeros((1, *recorded[0].shape[1:]), recorded[0].dtype)
    parts = [recorded[0][:num_prompt]]
    for sample in samples:
        length = len(sample.token_ids)
        if length and sample.experts is not None:
            parts += [sample.experts[num_prompt:], empty]
        else:
            parts.append(np.repeat(empty, length, 0))
    return np.concatenate(parts)


def requests_for(config: JobConfig | EvaluationJob, ticket: Ticket) -> list[tuple[Sampling, int]]:
    """Return the engine requests of a ticket: (sampling parameters, number of completions). The greedy request is
    last."""
    if ticket.purpose == "train" and isinstance(config, JobConfig):
        chosen, seed = config.sampling, derive_seed(config.seed, "draw", ticket.draw.ordinal, ticket.draw.n)
        num_samples, greedy = config.algorithm.group_size, config.algorithm.greedy_baseline
    else:
        chosen, seed = config.evaluation_sampling, derive_seed(config.seed, "eval_sample", ticket.draw.ordinal)
        num_samples, greedy = config.evaluation.samples, config.evaluation.greedy
    if ticket.temperature is not None:  # the config may have changed since this draw
        chosen = chosen.model_copy(update={"temperature": ticket.temperature})
    sampled = [(_sampling(chosen, seed), num_samples)] if num_samples else []
    plain = chosen.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})
    return [*sampled, (_sampling(plain, seed), 1)] if greedy else sampled


def _sampling(config: SamplingConfig, seed: int) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=tuple(config.stop_token_ids),
        stop_strings=tuple(config.stop),
        ignore_eos=config.ignore_eos,
        seed=seed,
    )


def completion_texts(
    samples: Sequence[Sample], decode: Callable[[list[int]], str], *, stop_tokens: frozenset[int], stop: Sequence[str]
) -> list[str]:
    """Return the texts for scorers: completions without their final stop token, cut before the first stop string."""
    texts = []
    for sample in samples:
        ids = sample.token_ids
        if sample.finish == "stop" and ids and ids[-1] in stop_tokens:
            ids = ids[:-1]
        text = decode(ids)
        for suffix in stop:
            cut = text.find(suffix)
            if cut >= 0:
                text = text[:cut]
        texts.append(text)
    return texts


def build_group(
    *,
    job: str,
    draw: Draw,
    epoch: int,
    worker: str,
    prompt: Prompt,
    samples: Sequence[Sample],
    texts: Sequence[str],
    temperature: float,
    num_greedy: int,
    seconds: float,
) -> Group:
    """Return an unscored group; the last ``num_greedy`` samples are greedy.

    An aborted completion is a failed trajectory: it is counted and never trained.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    cu_seqlens = np.zeros(len(samples) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    spans = [[i, span.version, span.start, span.end] for i, sample in enumerate(samples) for span in sample.spans]
    finish = [FINISH_REASONS.index(sample.finish) for sample in samples]
    return Group(
        job=job,
        draw=draw,
        attempt=new_attempt(),
        epoch=epoch,
        prompt_ids=np.asarray(prompt.token_ids, np.int32),
        token_ids=np.asarray([token for sample in samples for token in sample.token_ids], np.int32),
        cu_seqlens=cu_seqlens,
        logprobs=np.asarray([value for sample in samples for value in sample.logprobs], np.float32),
        mask=np.ones(int(cu_seqlens[-1]), np.uint8),
        rewards=np.zeros(len(samples), np.float32),
        failed=np.asarray([sample.finish == "abort" or not sample.token_ids for sample in samples], np.bool_),
        finish=np.asarray(finish, np.uint8),
        spans=np.asarray(spans, np.int32).reshape(-1, 4),
        weights=tuple(span.weights for sample in samples for span in sample.spans),
        greedy=np.arange(len(samples)) >= len(samples) - num_greedy,
        experts=group_experts(samples, len(prompt.token_ids)),
        temperature=temperature,
        meta={
            "prompt": prompt.text,
            "completions": list(texts),
            "answer": prompt.answer,
            "row": plain(prompt.row),
            "source": prompt.source,
            "worker": worker,
            "seconds": seconds,
        },
    )


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row whose values a message can carry."""
    return {str(k): v for k, v in row.items() if isinstance(v, str | int | float | bool | list | dict | None)}


def skipped_group(*, job: str, draw: Draw, epoch: int, worker: str, reason: str, prompt: Prompt) -> Group:
    """Return a group without trajectories for an unusable prompt. The coordinator then drops ``draw``, this attempt to
    get a group for the prompt, with the reason ``reason``, and does not try the prompt again."""
    meta = {"skipped": reason, "worker": worker, "prompt": prompt.text[:200], "source": prompt.source}
    return _empty_group(job=job, draw=draw, epoch=epoch, meta=meta)


def failed_group(*, job: str, draw: Draw, epoch: int, worker: str, error: str) -> Group:
    """Return a group without trajectories after an error. The coordinator then drops ``draw``, this attempt to get a
    group for the prompt, as 'failed', and makes a new draw for the same prompt."""
    return _empty_group(job=job, draw=draw, epoch=epoch, meta={"error": error, "worker": worker})


def _empty_group(*, job: str, draw: Draw, epoch: int, meta: dict[str, Any]) -> Group:
    empty = np.zeros(0, np.int32)
    return Group(
        job=job, draw=draw, attempt=new_attempt(), epoch=epoch, prompt_ids=empty, token_ids=empty,
        cu_seqlens=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32), mask=np.zeros(0, np.uint8),
        rewards=np.zeros(0, np.float32), failed=np.zeros(0, np.bool_), finish=np.zeros(0, np.uint8),
        spans=np.zeros((0, 4), np.int32), meta=meta,
    )  # fmt: skip
