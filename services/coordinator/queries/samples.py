"""Conversion of groups to rows for display, one row per completion, and of token ids to texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.shared.config.data import source_names
from penstock.shared.config.jobs.kinds import AnyTraining, parse_job
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.errors import NotFound
from penstock.shared.protocol.embodied.episode_group import AnyGroup, EpisodeGroup
from penstock.shared.protocol.trajectory import FINISH_REASONS, GroupHeader

__all__ = ["check_env", "choose_samples", "sample_detail", "sample_rows", "token_texts"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def check_env(spec: Mapping[str, Any], env: str) -> None:
    """Raise NotFound unless the job draws prompts from a source named ``env``."""
    config = parse_job(spec)
    if isinstance(config, AnyTraining):
        names = config.train_sources
    else:
        names = [] if isinstance(config, ServingJob) else source_names(config.data.eval)
    if env not in names:
        known = f"they are called {', '.join(names)}" if names else "it has none, for live agents send its prompts"
        raise NotFound(f"env: no source of this job is called '{env}'; {known}")


def choose_samples(
    headers: Sequence[tuple[int, GroupHeader]],
    *,
    sort: str | None,
    after: str | None,
    limit: int,
    min_reward: float | None = None,
    env: str | None = None,
) -> list[tuple[int, str]]:
    """Return the completions on one page of an evaluation job, as ``(stream sequence number of group, row id)``.

    ``sort``: ``reward``, ``-reward``, ``length``, ``-length``, or None for prompt order; ``after``: the last id of the
    previous page; ``min_reward`` excludes lower rewards and unscored completions; ``env`` selects one source.
    """
    found = [
        (reward, length, seq, f"0-{header.draw}-{index}")
        for seq, header in sorted(headers, key=lambda one: one[1].draw)
        if env is None or header.source == env
        for index, (reward, length) in enumerate(zip(header.rewards, header.lengths, strict=True))
        if min_reward is None or (reward >= min_reward and not header.failed[index])
    ]
    if sort is not None:
        found.sort(key=lambda one: one[0] if "reward" in sort else one[1], reverse=sort.startswith("-"))
    ids = [row_id for *_, row_id in found]
    start = ids.index(after) + 1 if after in ids else len(ids) if after else 0
    return [(seq, row_id) for _, _, seq, row_id in found[start : start + limit]]


def sample_rows(step: int, groups: Sequence[AnyGroup]) -> list[dict[str, Any]]:
    """Return one row per completion or episode of a batch, in batch order.

    ``advantage`` is relative to the group; None for a failed completion, or one without others to compare with.
    """
    rows = []
    for group in groups:
        if isinstance(group, EpisodeGroup):
            rows += _episode_rows(step, group)
            continue
        usable = group.rewards[~(group.failed | group.greedy)]
        mean = float(usable.mean()) if len(usable) else 0.0
        std = float(usable.std(ddof=1)) if len(usable) > 1 else 0.0
        texts = group.meta.get("transcripts") or group.meta.get("completions")  # multi-turn: transcripts
        completions = texts or [""] * group.num_trajectories
        for index in range(group.num_trajectories):
            mine = group.spans[group.spans[:, 0] == index][:, 1]
            start, end = int(group.cu_seqlens[index]), int(group.cu_seqlens[index + 1])
            reward = float(group.rewards[index])
            rows.append(
                {
                    "id": f"{step}-{group.draw}-{index}",
                    "step": step,
                    "draw": str(group.draw),
                    "index": index,
                    "env": group.meta.get("source", ""),
                    "prompt": group.meta.get("prompt", ""),
                    "completion": completions[index],
                    "answer": group.meta.get("answer"),
                    "reward": reward,
                    "parts": {name: float(values[index]) for name, values in group.parts.items()},
                    "advantage": _advantage(reward, mean, std) if len(usable) > 1 and not group.failed[index] else None,
                    "greedy": bool(group.greedy[index]),
                    "failed": bool(group.failed[index]),
                    "finish": FINISH_REASONS[int(group.finish[index])],
                    "tokens": end - start,
                    "logprob": float(np.sum(group.logprobs[start:end])),
                    "min_version": int(mine.min()) if len(mine) else 0,
                    "max_version": int(mine.max()) if len(mine) else 0,
                    "worker": group.meta.get("worker", ""),
                }
            )
    return rows


def _episode_rows(step: int, group: EpisodeGroup) -> list[dict[str, Any]]:
    usable = group.returns[~group.failed]
    mean = float(usable.mean()) if len(usable) else 0.0
    std = float(usable.std(ddof=1)) if len(usable) > 1 else 0.0
    rows = []
    for index in range(group.num_trajectories):
        start, end = int(group.cu_seqlens[index]), int(group.cu_seqlens[index + 1])
        versions = group.spans[group.spans[:, 0] == index][:, 1]
        reward, failed = float(group.returns[index]), bool(group.failed[index])
        steps = int(group.valid[start:end].sum())
        rows.append(
            {
                "id": f"{step}-{group.draw}-{index}",
                "step": step,
                "draw": str(group.draw),
                "index": index,
                "env": "",
                "prompt": f"{group.meta.get('task', '')} from reset id {group.reset_id}".strip(),
                "completion": f"solved in {steps} steps" if group.succeeded[index] else f"{steps} steps",
                "answer": None,
                "reset_id": group.reset_id,
                "reward": reward,
                "parts": {"return": reward},
                "success": bool(group.succeeded[index]),
                "solved_at_end": bool(group.solved_at_end[index]),
                "advantage": _advantage(reward, mean, std) if len(usable) > 1 and not failed else None,
                "greedy": False,
                "failed": failed,
                "finish": "abort" if failed else "length" if group.truncated[end - 1].any() else "stop",
                "tokens": end - start,
                "steps": steps,
                "logprob": float(np.sum(group.logprobs[start:end])),
                "min_version": int(versions.min()) if len(versions) else 0,
                "max_version": int(versions.max()) if len(versions) else 0,
                "worker": group.meta.get("worker", ""),
            }
        )
    return rows


def _advantage(reward: float, mean: float, std: float) -> float:
    """Return the normalized advantage of a reward in its group."""
    return 0.0 if std == 0 else (reward - mean) / (std + 1e-6)


def _episode_detail(row: dict[str, Any], group: EpisodeGroup, siblings: list[str]) -> dict[str, Any]:
    index = int(row["index"])
    cut = slice(int(group.cu_seqlens[index]), int(group.cu_seqlens[index + 1]))
    return {
        **row,
        "job": group.job,
        "attempt": group.attempt,
        "rewards": group.rewards[cut].tolist(),
        "actions": group.actions[cut].tolist(),
        "logprobs": group.logprobs[cut].tolist(),
        "valid": group.valid[cut].tolist(),
        "observations": {name: array[cut].tolist() for name, array in group.observations.items() if array.ndim <= 2},
        "siblings": siblings,
    }


def sample_detail(step: int, group: AnyGroup, index: int) -> dict[str, Any]:
    """Return the row of a completion with all data that is stored about it, token by token; for an episode, decision by
    decision.

    A completion has ``prompt_token_ids``, and lists of equal length: ``token_ids``, ``logprobs`` (of the sampler,
    natural logarithm), ``mask`` (1: chosen by the policy) and ``versions`` (policy version per token). ``siblings``:
    ids of the group's other completions.
    """
    rows = sample_rows(step, [group])
    siblings = [row["id"] for row in rows if row["index"] != index]
    if isinstance(group, EpisodeGroup):
        return _episode_detail(rows[index], group, siblings)
    start, end = int(group.cu_seqlens[index]), int(group.cu_seqlens[index + 1])
    versions = np.zeros(end - start, np.int64)
    for trajectory, version, first, stop in group.spans:
        if trajectory == index:
            versions[first:stop] = version
    return {
        **rows[index],
        "job": group.job,
        "attempt": group.attempt,
        "prompt_token_ids": group.prompt_ids.tolist(),
        "token_ids": group.token_ids[start:end].tolist(),
        "logprobs": [float(value) for value in group.logprobs[start:end]],
        "mask": group.mask[start:end].tolist(),
        "versions": versions.tolist(),
        "siblings": siblings,
    }


def token_texts(tokenizer: Path, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, from a file ``tokenizer.json``. Partial characters become U+FFFD.

    An id without a text becomes ``<ID>``. Blocks while it reads the file, unless the file is cached.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not describe a tokenizer.
    """
    texts = _texts_of(tokenizer)
    return [texts.get(id, f"<{id}>") for id in token_ids]


@lru_cache(maxsize=4)
def _texts_of(tokenizer: Path) -> dict[int, str]:
    try:
        described = msgspec.json.decode(tokenizer.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{tokenizer}: {error}") from None
    model = described["model"] if isinstance(described.get("model"), dict) else {}
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [text, score], in the order of the ids
        pieces = {id: str(entry[0]) for id, entry in enumerate(vocabulary)}
    else:
        pieces = {id: piece for piece, id in vocabulary.items()}
    stages = msgspec.json.encode([described.get("pre_tokenizer"), described.get("decoder")])
    in_bytes = b'"ByteLevel"' in stages
    texts = {id: _of_bytes(piece) if in_bytes else _of_piece(piece) for id, piece in pieces.items()}
    return texts | {added["id"]: added["content"] for added in described.get("added_tokens") or []}


def _of_bytes(piece: str) -> str:
    """Decode a byte-level BPE token (GPT-2, Llama 3, Qwen), in which each letter stands for one byte."""
    letters = _byte_letters()
    if not all(letter in letters for letter in piece):
        return piece
    return bytes(letters[letter] for letter in piece).decode("utf-8", "replace")


def _of_piece(piece: str) -> str:
    """Decode a SentencePiece token: "\u2581" is a space, ``<0x0A>`` a byte."""
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]).decode("utf-8", "replace") if byte else piece.replace("\u2581", " ")


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter encodes in a byte-level BPE token: a printable byte is its own letter, the other
    bytes have letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
