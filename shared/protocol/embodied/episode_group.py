"""Groups of episodes in a simulator: observations, actions, rewards, and the policy versions that acted.

A group is columnar: flat arrays over all decisions of its episodes plus ``cu_seqlens``. Its header has the same form as
the header of a group of completions (``trajectory.GroupHeader``), with decisions instead of tokens and returns instead
of rewards, so that gate, ledger and audit treat both alike.

Shapes: G episodes of the group, D decisions of all episodes, C actions of a decision, A components of an action, S
version spans, ... the shape of one observation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.frame import decode_frame, encode_frame
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.objective import OBJECTIVES, Objective
from penstock.shared.protocol.trajectory import Group, GroupHeader, check_spans, decode_group

__all__ = ["AnyGroup", "EpisodeGroup", "decode_any_group", "decode_episode_group", "encode_episode_group"]

KIND = "EpisodeGroup"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeGroup:
    """The G episodes of one draw. All begin from the same initial state, that of ``reset_id``.

    Attributes:
        draw: the draw for which a worker played the episodes; ``attempt`` is a random id for each time that it did.
        cu_seqlens: int32 [G+1], splits the decisions into episodes.
        observations: [D, ...] by name, before each decision, as the simulator returned them.
        final_observations: [G, ...] by name, after the last step of each episode.
        actions: [D, C, A] as sampled from the policy, before clipping and scaling: float32, or int64 if a component
            is the index of a discrete action or of a bin.
        logprobs: float32 [D, C, A], of each action component under the policy that sampled it, in nats.
        valid: int32 [D], number of executed actions of the chunk; those after the end of the episode were not executed.
        rewards: float32 [D, C]; terminated, truncated: bool [D, C], at the step where an episode ended. ``terminated``:
            the task ended, so the state after it has value 0. ``truncated``: the episode was cut off, so the value of
            the final observation still counts.
        returns: float32 [G], undiscounted sum of the rewards.
        succeeded: bool [G], the task was solved at some step; solved_at_end: bool [G], at the last one.
        failed: bool [G], episodes that must not be trained on because the simulator lost them.
        spans: int32 [S, 4]: episode, version, start, end; policy ``version`` made decisions [start, end).
        weights: short digest of the weights behind each span, "" if unknown; () if all are unknown.
        reset_id: id of the initial state of all episodes; state_hashes: uint64 [G], of the simulator's initial states.
        extras: [D, ...] by name: inputs that a policy needs to evaluate its actions again.
        objective: the loss that trains the group.
        meta: small JSON-like values for display: task, worker, seconds, error, skipped.

    Raises:
        ProtocolError: from ``check``, if arrays do not fit together.
    """

    job: str
    draw: Draw
    attempt: str
    epoch: int
    cu_seqlens: NDArray[np.int32]
    observations: dict[str, NDArray[Any]]
    final_observations: dict[str, NDArray[Any]]
    actions: NDArray[Any]
    logprobs: NDArray[np.float32]
    valid: NDArray[np.int32]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    returns: NDArray[np.float32]
    succeeded: NDArray[np.bool_]
    solved_at_end: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    spans: NDArray[np.int32]
    reset_id: int
    state_hashes: NDArray[np.uint64]
    weights: tuple[str, ...] = ()
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)
    objective: Objective = "policy"
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def num_trajectories(self) -> int:
        """Number of episodes, G."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of decisions in each episode, int32 [G]."""
        return np.diff(self.cu_seqlens).astype(np.int32)

    def check(self) -> None:
        """Raise ProtocolError unless all arrays fit together and the spans cover every decision exactly once."""
        g, d = self.num_trajectories, len(self.actions)
        cuts = self.cu_seqlens
        if g < 0 or cuts[0] != 0 or cuts[-1] != d or (np.diff(cuts) < 0).any():
            raise ProtocolError(f"group {self.draw}: cu_seqlens do not cut {d} decisions")
        of_decisions = {**self.observations, **self.extras, "logprobs": self.logprobs, "valid": self.valid}
        of_decisions |= {"rewards": self.rewards, "terminated": self.terminated, "truncated": self.truncated}
        of_episodes = {**self.final_observations, "returns": self.returns, "succeeded": self.succeeded}
        of_episodes |= {"solved_at_end": self.solved_at_end, "failed": self.failed, "state_hashes": self.state_hashes}
        for arrays, expected in ((of_decisions, d), (of_episodes, g)):
            for name, array in arrays.items():
                if len(array) != expected:
                    raise ProtocolError(f"group {self.draw}: '{name}' has {len(array)} rows for {expected}")
        if self.final_observations.keys() != self.observations.keys():
            raise ProtocolError(f"group {self.draw}: observations and final observations have other names")
        if self.actions.ndim != 3 or self.actions.dtype.name not in ("float32", "int64"):
            raise ProtocolError(f"group {self.draw}: actions must be [D, C, A] of float32 or int64")
        self._check_chunks(self.actions.shape[1])
        check_spans(self.draw, self.spans, self.weights, self.cu_seqlens, of="episode", every="decision")

    def _check_chunks(self, chunk: int) -> None:
        if self.logprobs.shape != self.actions.shape:
            raise ProtocolError(f"group {self.draw}: log-probs {self.logprobs.shape} for actions {self.actions.shape}")
        for name in ("rewards", "terminated", "truncated"):
            if getattr(self, name).shape[1:] != (chunk,):
                raise ProtocolError(f"group {self.draw}: '{name}' is not [D, {chunk}]")
        if len(self.valid) and not ((self.valid >= 1) & (self.valid <= chunk)).all():
            raise ProtocolError(f"group {self.draw}: each decision executes 1 to {chunk} actions")

    def header(self, *, digest: str, nbytes: int) -> GroupHeader:
        """Return the header that the coordinator's gate checks before it admits the group to a batch. Its ``lengths``
        are the numbers of decisions of the episodes, its ``rewards`` the returns of the episodes.

        ``digest`` and ``nbytes`` are of the encoded group.
        """
        versions = self.spans[:, 1]
        floats = [self.logprobs, self.rewards, self.returns, self.actions, *self.observations.values()]
        floats += self.final_observations.values()
        finite = all(np.isfinite(array).all() for array in floats if array.dtype.kind == "f")
        last = self.cu_seqlens[1:] - 1
        cut_off = [bool(n) and bool(self.truncated[at].any()) for n, at in zip(self.lengths, last, strict=True)]
        return GroupHeader(
            draw=self.draw,
            attempt=self.attempt,
            epoch=self.epoch,
            digest=digest,
            nbytes=nbytes,
            prompt_tokens=0,
            lengths=self.lengths.tolist(),
            rewards=[float(r) if np.isfinite(r) else 0.0 for r in self.returns],
            failed=self.failed.tolist(),
            truncated=cut_off,
            finite=finite,
            min_version=int(versions.min()) if len(versions) else 0,
            max_version=int(versions.max()) if len(versions) else 0,
            worker=str(self.meta.get("worker", "")),
            error=str(self.meta.get("error", ""))[:300],
            objective=self.objective,
            weights=sorted({(version, w) for version, w in zip(versions.tolist(), self.weights, strict=False) if w}),
            succeeded=self.succeeded.tolist(),
        )


_DTYPES = {"cu_seqlens": "int32", "logprobs": "float32", "valid": "int32", "rewards": "float32", "terminated": "bool",
           "truncated": "bool", "returns": "float32", "succeeded": "bool", "solved_at_end": "bool", "failed": "bool",
           "spans": "int32", "state_hashes": "uint64"}  # fmt: skip
_NAMED = ("observations", "final_observations", "extras")
_SCALARS = {"job": str, "attempt": str, "epoch": int, "reset_id": int, "meta": dict}


def encode_episode_group(group: EpisodeGroup) -> tuple[bytes, GroupHeader]:
    """Encode a group as one frame; return the frame and its header, whose digest is the xxh3-128 of the frame."""
    group.check()
    tree: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "draw": [group.draw.ordinal, group.draw.n],
        "actions": group.actions,
        "objective": group.objective,
        "weights": list(group.weights),
        **{name: getattr(group, name) for name in (*_SCALARS, *_NAMED)},
        **{name: np.asarray(getattr(group, name), dtype) for name, dtype in _DTYPES.items()},
    }
    data = b"".join(encode_frame(tree))
    return data, group.header(digest=xxhash.xxh3_128_hexdigest(data), nbytes=len(data))


def decode_episode_group(data: bytes | bytearray | memoryview) -> EpisodeGroup:
    """Inverse of ``encode_episode_group``; arrays are views of ``data`` where alignment allows.

    Raises:
        ProtocolError: another schema or kind, wrong dtypes, or arrays that do not fit together.
    """
    tree = decode_frame(data)
    if not isinstance(tree, dict) or tree.get("kind") != KIND or tree.get("schema") != SCHEMA:
        raise ProtocolError("not a group of episodes of a known schema")
    _check_tree(tree)
    group = EpisodeGroup(
        draw=Draw(*tree["draw"]),
        actions=tree["actions"],
        objective=tree["objective"],
        weights=tuple(tree["weights"]),
        **{name: tree[name] for name in (*_SCALARS, *_NAMED, *_DTYPES)},
    )
    group.check()
    return group


AnyGroup = Group | EpisodeGroup
"""Group of any training job, as stored in EXPERIENCE."""


def decode_any_group(data: bytes | bytearray | memoryview, *, temperature: float = 1.0) -> AnyGroup:
    """Decode a stored group of any job. ``temperature``: see ``decode_group``. Raises ProtocolError."""
    tree = decode_frame(data)
    if isinstance(tree, dict) and tree.get("kind") == KIND:
        return decode_episode_group(data)
    return decode_group(data, temperature=temperature)


def _check_tree(tree: dict[str, Any]) -> None:
    draw = tree.get("draw")
    if not (isinstance(draw, list) and len(draw) == 2 and all(type(number) is int for number in draw)):
        raise ProtocolError(f"group {draw}: 'draw' is not two whole numbers")
    for name, kind in _SCALARS.items():
        if not isinstance(tree.get(name), kind):
            raise ProtocolError(f"group {draw}: '{name}' is not a {kind.__name__}")
    for name, dtype in _DTYPES.items():
        array = tree.get(name)
        if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or not array.ndim:
            raise ProtocolError(f"group {draw}: '{name}' is not an array of {dtype}")
    for name in _NAMED:
        arrays = tree.get(name)
        if not isinstance(arrays, dict) or not all(isinstance(a, np.ndarray) and a.ndim for a in arrays.values()):
            raise ProtocolError(f"group {draw}: '{name}' does not hold arrays by name")
    if not isinstance(tree.get("actions"), np.ndarray) or tree.get("objective") not in OBJECTIVES:
        raise ProtocolError(f"group {draw}: 'actions' or 'objective' is not what it may be")
    weights = tree.get("weights")
    if not isinstance(weights, list) or not all(isinstance(short, str) for short in weights):
        raise ProtocolError(f"group {draw}: 'weights' is not a list of texts")
