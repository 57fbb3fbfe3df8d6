"""Simulators over the bus: open a session, reset and step its environments.

Arrays travel as frames; a frame above 1 MiB is replaced by a claim check of the bulk plane. Observations need not
travel to a client that can read the ``ObservationMemory`` of the session.

Semantics, for every simulator: ``step`` executes up to C actions of a chunk and stops an environment at its first
termination or truncation; rewards after that are 0 and not ``valid``. The observations at that moment are in
``final_observations``. With ``auto_reset`` a new episode begins in the same step and ``observations`` has its first
ones; without it, the environment must be reset before it is stepped again.

An episode whose simulator raises, hangs or dies is ``lost``: it has no result, ``reasons`` has the cause, and the
environment must be reset. The other environments of the request are not affected.

Shapes: n environments of a request, C actions of a chunk, k episodes that ended, ... the shape of one observation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.frame import Buffer, decode_frame, encode_frame

__all__ = [
    "HELD_OUT_SUCCESS",
    "TRAINED_SUCCESS",
    "ArraySpec",
    "Body",
    "CloseRequest",
    "EnvOpened",
    "EnvSpec",
    "FilmReply",
    "FilmRequest",
    "KeepRequest",
    "ObservationMemory",
    "OpenEnv",
    "Picture",
    "ResetReply",
    "ResetRequest",
    "RestoreRequest",
    "SnapshotReply",
    "SnapshotRequest",
    "StepReply",
    "StepRequest",
    "decode_env",
    "encode_env",
    "env_frame",
]

TRAINED_SUCCESS, HELD_OUT_SUCCESS = "success/rate", "eval/success"
"""Metrics that mean something only if the simulator reports success: ``EnvSpec.has_success``, ``held_out_success``."""
Observations = dict[str, NDArray[Any]]
"""Observations by name."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Request for an observation ``image``: uint8 [height, width, frames x (1 if grey, else 3)], the newest frame last.

    At the beginning of an episode, copies of its first picture replace the missing earlier frames.
    """

    height: int
    width: int
    grey: bool = False
    frames: int = 1


class OpenEnv(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a session of ``num_envs`` copies of ``env_id``, which closes after ``idle_s`` without a request.

    ``host`` is the host id of the requester. On the same host it may send its requests through a Unix socket and read
    observations in the memory of the simulators; otherwise they travel by NATS, and above 1 MiB by the bulk plane.
    """

    env_id: str
    num_envs: int
    backend: str = "gymnasium"
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the environment."""
    num_processes: int = 1
    """Child processes over which the environments are distributed."""
    step_limit_s: float = 60.0
    """Time limit of one request to a simulator (seconds); a simulator that exceeds it is killed."""
    idle_s: float = 60.0
    host: str = ""
    camera: bool = False
    """True: film every episode. Only sessions that make videos need this, because rendering takes longer than a
    step."""
    picture: Picture | None = None
    """Camera images to add as an observation; None: no camera images."""


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of one named observation of one environment."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_image(self) -> bool:
        """True for uint8 [H, W, C], which a policy reads through convolutions."""
        return self.dtype == "uint8" and len(self.shape) == 3


class EnvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an environment that a policy needs.

    ``num_actions`` is set for discrete actions, ``action_low`` and ``action_high`` for other actions.

    ``has_success``: the simulator reports if a task is solved or not. False: it has not reported either by the end of
    the first step, on which a description is based; environments of Gymnasium may still report success later.
    """

    env_id: str
    backend: str
    num_envs: int
    observations: dict[str, ArraySpec]
    """Observations by name; a simulator with a single vector calls it ``state``."""
    action_shape: tuple[int, ...]
    action_dtype: str
    num_actions: int | None
    action_low: list[float]
    action_high: list[float]
    max_episode_steps: int | None
    has_success: bool
    held_out_success: bool = False
    """``has_success`` of the simulator that plays a job's held-out episodes."""
    versions: dict[str, str]
    no_video: str = ""
    """Reason why episodes of the environment cannot be filmed, if a client requested a camera; '' otherwise."""
    has_snapshots: bool = False
    """True if episodes can be stored and continued, bit for bit."""


class ObservationMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Shared memory with the current observations of a session, for clients that are connected to the session by a Unix
    socket.

    The observations of all B environments with the name ``name`` are [B, ...] at byte ``offsets[name]``. The memory
    holds the observations of the last reply until the next request is sent.
    """

    descriptor: int
    """File descriptor of the memory in the process that serves the session."""
    inode: int
    size: int
    """Size of the memory in bytes."""
    offsets: dict[str, int]


class EnvOpened(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``OpenEnv``: the session, whose subject is ``subjects.env(session)``.

    ``socket`` is the address of a Unix socket that answers the same requests for processes of the same host; '': none.
    ``memory`` is the memory in which a process that has connected to the socket can read observations; None: replies
    contain them.
    """

    session: str
    spec: EnvSpec
    socket: str = ""
    memory: ObservationMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResetRequest:
    """Request to start new episodes. ``state_ids`` [n] are the only source of randomness: equal ids give equal
    episodes.

    ``seq`` numbers the requests of a session from 0. The server answers a repeated request from memory; a rejected
    request does not increase the number. With ``observe`` False the reply has no ``observations``: the client reads
    them in the session's ``ObservationMemory``.
    """

    seq: int
    env_ids: NDArray[np.int32]
    state_ids: NDArray[np.int64]
    observe: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResetReply:
    """Initial state of n episodes.

    Attributes:
        observations: by name, [n, ...], the first observations of the episodes.
        episode_ids: int64 [n].
        state_hashes: uint64 [n], of the simulator's states; callers compare them to check that all episodes of a group
            begin in the same state.
        tasks: n texts, '' if a task has no description.
        lost: bool [n], the simulator could not begin the episode; reasons: n texts, '' for episodes that began.
    """

    seq: int
    observations: Observations
    episode_ids: NDArray[np.int64]
    state_hashes: NDArray[np.uint64]
    tasks: list[str]
    lost: NDArray[np.bool_]
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRequest:
    """Request to step n environments. ``actions`` [n, C, ...] has a chunk of C actions for each environment.

    ``next_state_ids`` [n] are the state ids of the episodes that begin by ``auto_reset``. If it is empty (shape [0]),
    the server adds the number of environments of the session to each state id. After a restore it refuses an empty
    array, because restored episodes may share a state id. ``observe`` has the same meaning as in ``ResetRequest``.
    """

    seq: int
    auto_reset: bool
    env_ids: NDArray[np.int32]
    actions: NDArray[Any]
    next_state_ids: NDArray[np.int64]
    observe: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReply:
    """Results of a chunk of actions.

    Attributes:
        observations: by name, [n, ...], after the chunk. With ``auto_reset``, an environment whose episode ended has
            the first observation of its next episode.
        rewards: float32 [n, C]; terminated, truncated, success: bool [n, C].
        valid: int32 [n], number of executed actions.
        ended: bool [n], the episode ended during the chunk.
        final_observations: by name, [k, ...], the last observations of the k ended episodes, in order.
        lost: bool [n], the episode was aborted, or the next one did not begin; reasons: n texts, '' where not lost.
        state_ids, episode_ids: int64 [n], of the episode that was stepped.
        returns: float32 [n], undiscounted reward sum of that episode so far; lengths: int32 [n], its steps.
        succeeded: bool [n], the task was solved at some step of that episode so far.
        next_episode_ids: int64 [n], of the episode that the next step belongs to.
        state_hashes: uint64 [n], of the initial state of the next episode, 0 if none began.
        tasks: n descriptions of the next episode's task.
    """

    seq: int
    observations: Observations
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    valid: NDArray[np.int32]
    ended: NDArray[np.bool_]
    lost: NDArray[np.bool_]
    reasons: list[str]
    final_observations: Observations
    state_ids: NDArray[np.int64]
    episode_ids: NDArray[np.int64]
    next_episode_ids: NDArray[np.int64]
    returns: NDArray[np.float32]
    lengths: NDArray[np.int32]
    succeeded: NDArray[np.bool_]
    state_hashes: NDArray[np.uint64]
    tasks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CloseRequest:
    """Request to end the session; the reply is the same message."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilmRequest:
    """Request for the film of the newest episode of an environment, in a session with a camera. ``seq``: see
    ``ResetRequest``."""

    seq: int
    env_id: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilmReply:
    """Reply to ``FilmRequest``: ``film`` is an MP4 file as uint8 [bytes], ``reasons`` has the reason if there is no
    film, and is empty otherwise."""

    seq: int
    film: NDArray[np.uint8]
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotRequest:
    """Request to store the running episodes of the environments ``env_ids`` [n]; the episodes continue. ``seq``: see
    ``ResetRequest``."""

    seq: int
    env_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotReply:
    """Reply with the stored episodes: the bytes of all snapshots in ``snapshots``, uint8 [bytes], and the size of each
    in ``sizes``, int64 [n].

    ``lost`` [n] marks the episodes that the simulator lost, ``reasons`` has the cause of each, '' for the others.
    """

    seq: int
    snapshots: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    lost: NDArray[np.bool_]
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestoreRequest:
    """Request to continue stored episodes in n environments. The continued episodes are new episodes that start with
    the length and return of the stored ones.

    ``snapshots`` and ``sizes`` are as in ``SnapshotReply``, ``observe`` is as in ``ResetRequest``. The reply is a
    ``ResetReply``.
    """

    seq: int
    env_ids: NDArray[np.int32]
    snapshots: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    observe: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeepRequest:
    """Keep-alive message of a client that sends no other requests; the reply is the same message. A keep-alive does not
    advance ``seq``."""

    seq: int


_DTYPES = {name: np.dtype(dtype) if dtype else None for name, dtype in {
    "env_ids": "int32", "state_ids": "int64", "next_state_ids": "int64", "episode_ids": "int64",
    "next_episode_ids": "int64", "state_hashes": "uint64", "rewards": "float32", "terminated": "bool",
    "truncated": "bool", "success": "bool", "succeeded": "bool", "lost": "bool", "valid": "int32", "ended": "bool",
    "returns": "float32", "lengths": "int32", "actions": "", "film": "uint8",
    "snapshots": "uint8", "sizes": "int64",
}.items()}  # fmt: skip
"""Dtype of every array field of all messages; None: the simulator decides."""
_NAMED = ("observations", "final_observations")
_TEXTS = ("tasks", "reasons")

Body = (
    ResetRequest | ResetReply | StepRequest | StepReply | FilmRequest | FilmReply | SnapshotRequest | SnapshotReply
    | RestoreRequest | CloseRequest | KeepRequest
)  # fmt: skip
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Body)}
_FIELDS = {kind: {field.name: field.default for field in dataclasses.fields(kind)} for kind in _KINDS.values()}
"""Names and defaults of the fields of all messages. Frames omit a field that has its default value, as older versions
do."""
B = TypeVar("B", bound=Body)


def env_frame(body: Body) -> list[Buffer]:
    """Encode ``body`` as one frame, in buffers that alias its arrays."""
    fields = _FIELDS[type(body)].items()
    tree = {name: value for name, default in fields if (value := getattr(body, name)) is not default}
    return encode_frame({"schema": SCHEMA, "kind": type(body).__name__, **tree})


def encode_env(body: Body) -> bytes:
    """Encode ``body`` as one frame."""
    return b"".join(env_frame(body))


def decode_env(data: bytes | memoryview, *kinds: type[B]) -> B:
    """Decode a message whose type must be one of ``kinds``.

    Raises:
        ProtocolError: another schema or kind, missing fields, or arrays of a wrong dtype.
    """
    tree = decode_frame(data)
    if not isinstance(tree, dict) or tree.pop("schema", None) != SCHEMA:
        raise ProtocolError("not an environment message of a known schema")
    kind = _KINDS.get(str(tree.pop("kind", "")))
    if kind is None or kind not in kinds:
        raise ProtocolError(f"expected {' or '.join(k.__name__ for k in kinds)}, got another message")
    fields = _FIELDS[kind]
    if tree.keys() != fields.keys() and (
        tree.keys() - fields or any(fields[name] is dataclasses.MISSING for name in fields.keys() - tree)
    ):
        raise ProtocolError(f"{kind.__name__} has the fields {sorted(tree)}; it needs {sorted(_FIELDS[kind])}")
    for name, value in tree.items():
        if problem := _problem(name, value):
            raise ProtocolError(f"{kind.__name__}.{name} must {problem}")
    body: B = kind(**tree)
    return body


def _problem(field: str, value: Any) -> str:
    """Check the ``value`` of a ``field``. Return the requirement that it violates, for an error message; '' if it
    violates none."""
    if field in _DTYPES:
        dtype = _DTYPES[field]
        if not isinstance(value, np.ndarray) or (dtype is not None and value.dtype != dtype):
            return "be an array" + (f" of {dtype}" if dtype else "")
    elif field in _NAMED:
        if not isinstance(value, dict) or not all(isinstance(array, np.ndarray) for array in value.values()):
            return "hold arrays by name"
    elif field in _TEXTS:
        if not isinstance(value, list) or not {str}.issuperset(map(type, value)):
            return "be a list of texts"
    elif not isinstance(value, int):
        return f"be a number, found {type(value).__name__}"
    return ""
