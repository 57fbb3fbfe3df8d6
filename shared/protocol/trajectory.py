"""Trajectories and groups: tokens that a policy generated, the versions that generated them, and their rewards.

A group is columnar: flat arrays over all tokens of its trajectories plus ``cu_seqlens``, never a tensor per trajectory.

Shapes: G trajectories of the group, N tokens of all completions, P prompt tokens, S version spans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.frame import decode_frame, encode_frame
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import ScoreReply
from penstock.shared.protocol.objective import OBJECTIVES, Objective
from penstock.shared.protocol.parts import num_parts
from penstock.shared.protocol.trace import TRACE_HEADER, current_trace

__all__ = [
    "FINISH_REASONS",
    "Group",
    "GroupHeader",
    "check_spans",
    "decode_group",
    "encode_group",
    "group_headers",
    "parse_group_header",
]

GROUP_HEADER = "Penstock-Group"
"""Message header with a GroupHeader as JSON."""

FINISH_REASONS = ("stop", "length", "abort")
"""Values of ``Group.finish``, by index: stop token or string, token limit, aborted."""


class GroupHeader(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """Properties of a group that the gate checks before it admits the group to a batch. They travel in a message
    header, so that readers need no payload.

    ``lengths``, ``rewards``, ``failed`` and ``truncated`` have one entry per trajectory. ``skipped`` is the reason why
    there is no trajectory at all (`prompt_too_long`); then the draw is dropped for that reason and its ordinal is not
    redrawn. ``error`` is the first scoring error, for display. ``greedy`` marks completions decoded at temperature 0;
    empty: none. The gate's lag bound applies only to ``objective`` `policy`. ``temperature`` is as in ``Group``;
    earlier versions did not write it. ``source`` is the name of the data source of the prompt; empty if a live agent
    sent the prompt, or an earlier version wrote the header. ``weights`` are the policy versions in the spans of the
    group, with the short digests of their weights, if known. ``succeeded``: the task of an episode was solved, one
    entry per episode; empty for completions, and in headers of earlier versions.
    """

    draw: Draw
    attempt: str
    epoch: int
    digest: str
    nbytes: int
    prompt_tokens: int
    lengths: list[int]
    rewards: list[float]
    failed: list[bool]
    truncated: list[bool]
    finite: bool
    min_version: int
    max_version: int
    worker: str
    skipped: str = ""
    error: str = ""
    greedy: list[bool] = msgspec.field(default_factory=list)
    objective: Objective = "policy"
    temperature: float | None = None
    source: str = ""
    weights: list[tuple[int, str]] = msgspec.field(default_factory=list)
    succeeded: list[bool] = msgspec.field(default_factory=list)

    @property
    def num_messages(self) -> int:
        """Number of consecutive stream messages that hold the group; the message with this header is the first."""
        return num_parts(self.nbytes)

    @property
    def counted(self) -> list[int]:
        """Indices of the trajectories that may be trained on: not greedy, not failed, not empty."""
        greedy = self.greedy or [False] * len(self.lengths)
        rows = zip(self.failed, self.lengths, greedy, strict=True)
        return [i for i, (failed, length, is_greedy) in enumerate(rows) if not failed and length > 0 and not is_greedy]

    @property
    def baseline(self) -> float | None:
        """Reward of the greedy completion; None if there is none or it could not be scored."""
        rows = zip(self.rewards, self.failed, self.greedy, strict=False)
        return next((reward for reward, failed, is_greedy in rows if is_greedy and not failed), None)

    @property
    def has_signal(self) -> bool:
        """True if the rewards of the counted trajectories and the baseline are not all equal. If they are all equal,
        all advantages are 0."""
        rewards = {self.rewards[i] for i in self.counted}
        return len(rewards if self.baseline is None else rewards | {self.baseline}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G trajectories of one draw, all for the same prompt.

    Attributes:
        draw: the draw for which a worker generated the group; ``attempt`` is a random id for each time that it did.
        prompt_ids: int32 [P].
        token_ids: int32 [N], the concatenated completions; ``cu_seqlens`` int32 [G+1] splits them.
        logprobs: float32 [N], behaviour log-probs: log softmax(logits / temperature) of the sampled token.
        mask: uint8 [N], 1 for tokens of the policy, 0 for observations.
        rewards: float32 [G]; ``parts`` float32 [G] per reward component.
        failed: bool [G], trajectories that must not be trained on (scorer failed, aborted).
        finish: uint8 [G], index into FINISH_REASONS.
        greedy: bool [G], completions decoded at temperature 0: never trained on and excluded from group statistics. In
            training the reward of the greedy completion is the group's baseline; default: no completion is greedy.
        experts: uint8 or uint16 [P + N, layers with experts, experts of a token], the router table of prompt and
            completions if the job replays it; None otherwise.
        spans: int32 [S, 4]: trajectory, version, start, end; policy ``version`` generated tokens [start, end).
        weights: short digest of the weights behind each span, "" if unknown; () if all are unknown.
        objective: the loss that trains the group. A preference has two trajectories, the better one first; the reward
            of both is the strength of the preference.
        assumed: the sampling policy is unknown and taken to be the newest one; the log-probs are meaningless.
        temperature: sampling temperature of all completions except the greedy one; the trainer's log-probs are of
            logits / temperature, too. 0: all are greedy, and none is trained on.
        meta: small JSON-like values for display: prompt text, completions, answer, source, worker, seconds.
    """

    job: str
    draw: Draw
    attempt: str
    epoch: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.uint8]
    rewards: NDArray[np.float32]
    failed: NDArray[np.bool_]
    finish: NDArray[np.uint8]
    spans: NDArray[np.int32]
    greedy: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    experts: NDArray[Any] | None = None
    weights: tuple[str, ...] = ()
    objective: Objective = "policy"
    assumed: bool = False
    temperature: float = 1.0
    parts: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.greedy):
            object.__setattr__(self, "greedy", np.zeros(self.num_trajectories, np.bool_))

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, G."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each completion, int32 [G]."""
        return np.diff(self.cu_seqlens).astype(np.int32)

    @property
    def baseline(self) -> float | None:
        """Reward of the greedy completion (ReMax); None if there is none or it could not be scored."""
        scored = self.rewards[self.greedy & ~self.failed]
        return float(scored[0]) if len(scored) else None

    def scored(self, reply: ScoreReply) -> Group:
        """Return a copy with the rewards of ``reply``. A trajectory counts as failed if its scoring failed, or if it
        had already failed."""
        scored = replace(
            self,
            rewards=np.asarray(reply.rewards, np.float32),
            failed=self.failed | np.asarray(reply.failed, np.bool_),
            parts={name: np.asarray(values, np.float32) for name, values in reply.parts.items()},
        )
        if reply.errors:
            scored.meta["error"] = reply.errors[0]
        return scored

    def check(self) -> None:
        """Raise ProtocolError unless all arrays fit together and the spans cover every token exactly once."""
        n, g = len(self.token_ids), self.num_trajectories
        if g < 0 or self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != n or (np.diff(self.cu_seqlens) < 0).any():
            raise ProtocolError(f"group {self.draw}: cu_seqlens do not cut {n} tokens")
        if len(self.logprobs) != n or len(self.mask) != n:
            raise ProtocolError(
                f"group {self.draw}: {n} tokens but {len(self.logprobs)} log-probs, {len(self.mask)} mask"
            )
        if not len(self.rewards) == len(self.failed) == len(self.finish) == len(self.greedy) == g:
            raise ProtocolError(f"group {self.draw}: rewards, failed, finish and greedy must have {g} entries")
        if self.experts is not None:
            self._check_experts(len(self.prompt_ids) + n)
        self._check_kinds(g)
        if not 0 <= self.temperature < math.inf:
            raise ProtocolError(f"group {self.draw}: its temperature is {self.temperature}")
        check_spans(self.draw, self.spans, self.weights, self.cu_seqlens, of="trajectory", every="token")

    def _check_kinds(self, g: int) -> None:
        if self.greedy.sum() > 1:
            raise ProtocolError(f"group {self.draw}: at most one completion is greedy, found {self.greedy.sum()}")
        wanted = {"supervised": 1, "preference": 2}.get(self.objective, 0)
        if g and wanted and (g != wanted or self.failed.any() or self.greedy.any()):
            raise ProtocolError(f"group {self.draw} is {self.objective}: it needs {wanted} completions, found {g}")

    def _check_experts(self, num_tokens: int) -> None:
        assert self.experts is not None
        if self.experts.ndim != 3 or len(self.experts) != num_tokens or self.experts.dtype.name not in _EXPERT_DTYPES:
            raise ProtocolError(
                f"group {self.draw}: a router table of {self.experts.dtype}{list(self.experts.shape)} for {num_tokens} "
                f"tokens; it is [tokens, layers, experts of a token] of {' or '.join(_EXPERT_DTYPES)}"
            )

    def header(self, *, digest: str, nbytes: int) -> GroupHeader:
        """Return the header that the coordinator's gate checks before it admits the group to a batch. ``digest`` and
        ``nbytes`` describe the encoded group."""
        versions = self.spans[:, 1]
        finite = bool(np.isfinite(self.logprobs).all() and np.isfinite(self.rewards).all())
        return GroupHeader(
            draw=self.draw,
            attempt=self.attempt,
            epoch=self.epoch,
            digest=digest,
            nbytes=nbytes,
            prompt_tokens=len(self.prompt_ids),
            lengths=self.lengths.tolist(),
            rewards=[float(r) if np.isfinite(r) else 0.0 for r in self.rewards],
            failed=self.failed.tolist(),
            truncated=(self.finish == FINISH_REASONS.index("length")).tolist(),
            finite=finite,
            min_version=int(versions.min()) if len(versions) else 0,
            max_version=int(versions.max()) if len(versions) else 0,
            worker=str(self.meta.get("worker", "")),
            skipped=str(self.meta.get("skipped", "")),
            error=str(self.meta.get("error", ""))[:300],
            greedy=self.greedy.tolist() if self.greedy.any() else [],
            objective=self.objective,
            temperature=self.temperature,
            source=str(self.meta.get("source", "")),
            weights=sorted({(version, w) for version, w in zip(versions.tolist(), self.weights, strict=False) if w}),
        )


def check_spans(
    draw: Draw, spans: NDArray[np.int32], weights: Sequence[str], cu_seqlens: NDArray[np.int32], *, of: str, every: str
) -> None:
    """Raise ProtocolError unless the version spans [S, 4] cover every trajectory of a group exactly once, in order.

    Args:
        weights: short digest of the weights behind each span, or empty.
        cu_seqlens: [G+1], splits the group into trajectories.
        of, every: words for a trajectory and for one of its elements, for error messages.
    """
    if spans.ndim != 2 or spans.shape[1] != 4 or len(weights) not in (0, len(spans)):
        raise ProtocolError(f"group {draw}: spans must be [S, 4], and weights one for each or none")
    lengths = np.diff(cu_seqlens)
    ends = np.zeros(len(lengths), np.int64)
    for place, _, start, end in spans.tolist():
        if not 0 <= place < len(ends) or start != ends[place] or end <= start:
            raise ProtocolError(f"group {draw}: version spans do not cover {of} {place} in order")
        ends[place] = end
    if (ends != lengths).any():
        raise ProtocolError(f"group {draw}: version spans do not cover every {every}")


_ARRAYS = (
    "prompt_ids", "token_ids", "cu_seqlens", "logprobs", "mask", "rewards", "failed", "finish", "spans", "greedy",
)  # fmt: skip
_SCALARS = {"job": str, "attempt": str, "epoch": int, "temperature": float, "meta": dict, "parts": dict}
_EXPERT_DTYPES = ("uint8", "uint16")
_DTYPES = {"prompt_ids": "int32", "token_ids": "int32", "cu_seqlens": "int32", "logprobs": "float32", "mask": "uint8",
           "rewards": "float32", "failed": "bool", "finish": "uint8", "spans": "int32", "greedy": "bool"}  # fmt: skip


def encode_group(group: Group) -> tuple[bytes, GroupHeader]:
    """Encode a group as one frame; return the frame and its header, whose digest is the xxh3-128 of the frame."""
    group.check()
    tree: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "Group",
        "job": group.job,
        "draw": [group.draw.ordinal, group.draw.n],
        "attempt": group.attempt,
        "epoch": group.epoch,
        "temperature": float(group.temperature),
        "meta": group.meta,
        "parts": {name: np.asarray(values, np.float32) for name, values in group.parts.items()},
        **{name: np.asarray(getattr(group, name), _DTYPES[name]) for name in _ARRAYS},
        **({} if group.experts is None else {"experts": group.experts}),
        **({} if group.objective == "policy" else {"objective": group.objective}),
        **({"assumed": True} if group.assumed else {}),
        **({"weights": list(group.weights)} if any(group.weights) else {}),
    }
    data = b"".join(encode_frame(tree))
    return data, group.header(digest=xxhash.xxh3_128_hexdigest(data), nbytes=len(data))


def decode_group(data: bytes | bytearray | memoryview, *, temperature: float = 1.0) -> Group:
    """Inverse of ``encode_group``; arrays are views of ``data`` where alignment allows.

    Args:
        temperature: default for groups stored by earlier versions, which had the temperature of the job.

    Raises:
        ProtocolError: another schema, wrong dtypes, or arrays that do not fit together.
    """
    tree = decode_frame(data)
    if not isinstance(tree, dict) or tree.get("kind") != "Group" or tree.get("schema") != SCHEMA:
        raise ProtocolError("not a group of a known schema")
    tree.setdefault("temperature", temperature)
    _check_tree(tree)
    try:
        arrays = {name: tree[name] for name in _ARRAYS}
        ordinal, n = tree["draw"]
        group = Group(
            job=tree["job"],
            draw=Draw(ordinal, n),
            attempt=tree["attempt"],
            epoch=tree["epoch"],
            temperature=tree["temperature"],
            meta=tree["meta"],
            parts=tree["parts"],
            experts=tree.get("experts"),
            objective=tree.get("objective", "policy"),
            assumed=tree.get("assumed", False),
            weights=tuple(tree.get("weights", ())),
            **arrays,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"group does not decode: {error!r}") from None
    group.check()
    return group


def _check_tree(tree: dict[str, Any]) -> None:
    """Raise ProtocolError unless every field of a group has its type, and every array its dimensions."""
    draw, experts = tree.get("draw"), tree.get("experts")
    for name, kind in _SCALARS.items():
        if not isinstance(tree.get(name), kind):
            raise ProtocolError(f"group {draw}: '{name}' is not a {kind.__name__}")
    if not (isinstance(draw, list) and len(draw) == 2 and all(type(number) is int for number in draw)):
        raise ProtocolError(f"group {draw}: 'draw' is not two whole numbers")
    for name, dtype in _DTYPES.items():
        array, ndim = tree.get(name), 2 if name == "spans" else 1
        if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != ndim:
            raise ProtocolError(f"group {draw}: '{name}' is not an array of {dtype} with {ndim} dimensions")
    if not all(isinstance(values, np.ndarray) and values.ndim == 1 for values in tree["parts"].values()):
        raise ProtocolError(f"group {draw}: 'parts' holds something else than arrays")
    if tree.get("objective", "policy") not in OBJECTIVES or not isinstance(tree.get("assumed", False), bool):
        raise ProtocolError(f"group {draw}: 'objective' or 'assumed' is not what it may be")
    weights = tree.get("weights", [])
    if not isinstance(weights, list) or not all(isinstance(short, str) for short in weights):
        raise ProtocolError(f"group {draw}: 'weights' is not a list of texts")
    if experts is not None and not isinstance(experts, np.ndarray):
        raise ProtocolError(f"group {draw}: 'experts' is not an array")


_header_decoder = msgspec.json.Decoder(GroupHeader)


def group_headers(header: GroupHeader) -> dict[str, str]:
    """Return the message headers of a published group, including the trace id of the current task."""
    headers = {GROUP_HEADER: msgspec.json.encode(header).decode()}
    return {**headers, TRACE_HEADER: trace} if (trace := current_trace()) else headers


def parse_group_header(headers: Mapping[str, str]) -> GroupHeader:
    """Inverse of ``group_headers``.

    Raises:
        ProtocolError: the header is missing or malformed, or its lists differ in length.
    """
    text = headers.get(GROUP_HEADER)
    if text is None:
        raise ProtocolError(f"message has no {GROUP_HEADER} header")
    try:
        header = _header_decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{GROUP_HEADER} header does not decode: {error}") from None
    g, optional = len(header.lengths), {len(header.greedy), len(header.succeeded)}
    if not len(header.rewards) == len(header.failed) == len(header.truncated) == g or not optional <= {0, g}:
        raise ProtocolError(f"{GROUP_HEADER} header: its lists do not have {g} entries each")
    return header
