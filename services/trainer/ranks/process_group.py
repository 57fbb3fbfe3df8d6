"""The ranks of one trainer as a ``Collective`` over torch.distributed.

Only raw arrays and msgpack cross these sockets, never pickle. Every wait ends at the deadline or as soon as a peer's
connection closes, with an error that names the operation.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.rendezvous import rendezvous

from penstock.shared.errors import ConfigError, RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Place", "ProcessGroup", "Stages", "World", "join", "place_from_environment", "store_of_this_start"]

MEETING_POLL_S = 0.1

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables as torchrun sets them."""
_SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out")


@dataclass(frozen=True, slots=True)
class Place:
    """Rank of this process, and ``size``, the number of ranks. ``local_rank``: rank on this host; selects the GPU."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them rank 0 of 1.

    Raises:
        ConfigError: some variables are missing or invalid.
    """
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        return Place()
    if len(given) < len(VARIABLES):
        missing = ", ".join(sorted(set(VARIABLES) - set(given)))
        raise ConfigError(f"{', '.join(given)} set, but not {missing}: ranks need all four, a single process none")
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK") or rank)
        int(environment["MASTER_PORT"])
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be numbers: {error}") from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK {rank} is not one of WORLD_SIZE {size} ranks")
    return Place(rank, size, local_rank)


class Stages:
    """Nested stages of the work that all ranks do together. One thread enters and leaves them; others only read."""

    def __init__(self) -> None:
        self.entered = 0
        """Number of stages entered so far."""
        self._open: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " > ".join(self._open)

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Enter stage ``what`` for the duration of the block."""
        before, self._open = self._open, (*self._open, what)
        self.entered += 1
        try:
            yield
        finally:
            self._open = before


class ProcessGroup:
    """Implements ``Collective`` and ``CheckpointRanks`` over one gloo group."""

    def __init__(self, handle: dist.ProcessGroup, *, deadline_s: float, stages: Stages) -> None:
        self.handle = handle
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        self._deadline_s, self._stages = deadline_s, stages

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """Return the arrays of every rank, in rank order; see ``Collective``."""
        table = {name: (array.dtype.str, np.ascontiguousarray(array).tobytes()) for name, array in arrays.items()}
        parts = [
            msgspec.msgpack.decode(part, type=dict[str, tuple[str, bytes]])
            for part in self._exchange(msgspec.msgpack.encode(table), "facts of the batch")
        ]
        assert all(part.keys() == table.keys() for part in parts), "ranks gather different names"
        return [{name: np.frombuffer(data, dtype).copy() for name, (dtype, data) in part.items()} for part in parts]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return sums over ranks, added in rank order so that every rank gets the same bits; see ``Collective``."""
        parts = self._numbers(values)
        return {name: sum(part[name] for part in parts) for name in values}

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return maxima over ranks; see ``Collective``."""
        parts = self._numbers(values)
        return {name: max(part[name] for part in parts) for name in values}

    def agree(self, ok: bool) -> bool:
        """Return True if every rank passed True; see ``Collective``."""
        return all(part == b"\1" for part in self._exchange(b"\1" if ok else b"\0", "a vote"))

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; see ``Collective``."""
        return self._exchange(data or b"", "word of rank 0")[0]

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Convert connection failures between ranks to an error that names the operation ``what``.

        Raises:
            RankLost: in place of the library's error.
        """
        try:
            with self._stages.inside(what):
                yield
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
                raise
            raise RankLost(
                f"rank {self.rank} of {self.size} waited for the others ({what}): one of them died, or did not respond "
                f"for {self._deadline_s:g} s ({_cause(error)})"
            ) from error

    def _numbers(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        data = msgspec.msgpack.encode({name: float(value) for name, value in values.items()})
        parts = [msgspec.msgpack.decode(p, type=dict[str, float]) for p in self._exchange(data, "sums over the ranks")]
        assert all(part.keys() == values.keys() for part in parts), "ranks add up different names"
        return parts

    def _exchange(self, data: bytes, what: str) -> list[bytes]:
        """Return the bytes of all ranks in rank order."""
        with self.during(what):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self.handle)
            longest = max(1, *(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self.handle)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _cause(error: Exception) -> str:
    """Return the first line of the library's message, without its advice about typical causes."""
    return str(error).strip().split("\n", 1)[0].split(". This is typically", 1)[0] or type(error).__name__


class World:
    """All ranks of the trainer: the training group, a group for concurrent checkpoint writes, and the store.

    The group ``votes`` carries only votes on errors: a failed rank waits there while others may still be in the
    collectives of the failed operation.
    """

    def __init__(self, place: Place, store: Store, *, deadline_s: float) -> None:
        self.place, self.store, self.deadline_s = place, store, deadline_s
        self.stages, self._writing = Stages(), Stages()
        self.failure = ""
        """Error that this rank met in a joint operation, as long as the ranks have not voted on it; '' if none."""
        self.everybody = self._group(range(place.size))
        self.votes = self._group(range(place.size))
        self.checkpoints = self._group(range(place.size), self._writing)
        self._data_parallel = {1: self.everybody}

    def data_parallel(self, model_parallel: int) -> ProcessGroup:
        """Return this rank's data-parallel group. A copy of the model is divided among N adjacent ranks, where N is
        ``model_parallel``. The group has one rank of each copy: the one at the same position in its copy.

        Raises:
            ConfigError: the number of ranks is not divisible by ``model_parallel``.
        """
        size = self.place.size
        if size % model_parallel:
            raise ConfigError(f"{size} trainer ranks cannot be cut into models of {model_parallel} ranks each")
        if model_parallel not in self._data_parallel:
            groups = [self._group(range(first, size, model_parallel)) for first in range(model_parallel)]
            self._data_parallel[model_parallel] = groups[self.place.rank % model_parallel]
        return self._data_parallel[model_parallel]

    def leave(self) -> None:
        """Close all connections. Other ranks notice at their next collective."""
        dist.destroy_process_group()

    def _group(self, ranks: range, stages: Stages | None = None) -> ProcessGroup:
        timeout = timedelta(seconds=self.deadline_s)
        handle = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        if self.place.rank not in ranks:
            return None  # type: ignore[return-value]  # never used: every rank keeps only its own group
        return ProcessGroup(handle, deadline_s=self.deadline_s, stages=stages or self.stages)


def join(place: Place, *, deadline_s: float) -> World:
    """Connect to the other ranks. CPU tensors use gloo, GPU tensors NCCL.

    Args:
        deadline_s: longest wait for another rank, here and in every collective.

    Raises:
        RankLost: not all ranks connected.
    """
    timeout = timedelta(seconds=deadline_s)
    try:
        if place.size == 1:
            store: Store = dist.HashStore()  # type: ignore[attr-defined]
        else:
            store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = store_of_this_start(store, place, deadline_s=deadline_s)
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local_rank)
            backend = "cpu:gloo,cuda:nccl"
        group_store = dist.PrefixStore("groups", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=group_store, rank=place.rank, world_size=place.size, timeout=timeout)
        return World(place, store, deadline_s=deadline_s)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise RankLost(
            f"rank {place.rank} of {place.size} did not meet the others within {deadline_s:g} s: {reason}"
        ) from error


def store_of_this_start(store: Store, place: Place, *, deadline_s: float) -> Store:
    """Return a part of torchrun's store that only this start of the trainer uses. torchrun itself keeps one store for
    all restarts.

    Rank 0 names each start. The other ranks sign up under the newest name and move to a newer one when it appears. They
    may have found the name of an earlier start, so a start is valid only once rank 0 has confirmed the processes that
    signed up. The restart counters of torchrun's agents are no substitute: each agent counts only its own restarts.

    Raises:
        TimeoutError: some ranks did not sign up.
        ConnectionAbortedError: this is rank 0, and another rank 0 has started since.
    """
    board: Store = dist.PrefixStore("starts", store)  # type: ignore[attr-defined]
    own, start = uuid.uuid4().hex, ""
    if place.rank == 0:
        board.set("newest", own)
    end = time.monotonic() + deadline_s
    while True:
        newest = board.get("newest").decode() if board.check(["newest"]) else ""
        if place.rank == 0 and newest != own:
            raise ConnectionAbortedError("another rank 0 has started since, this one is left over")
        if newest != start:
            start = newest
            board.set(f"{start}/signed/{place.rank}", own)
        if start and _confirmed(board, start, place, own):
            return dist.PrefixStore(start, board)  # type: ignore[attr-defined]
        if time.monotonic() > end:
            raise TimeoutError(_who_is_missing(board, start, place.size))
        time.sleep(MEETING_POLL_S)


def _confirmed(board: Store, start: str, place: Place, own: str) -> bool:
    """Return True if rank 0 has confirmed that the process with id ``own`` takes part in ``start``, one start of the
    trainer. On rank 0, first confirm the processes of all ranks if all have signed up."""
    signed, confirmed = _signatures(start, place.size), f"{start}/confirmed"
    if place.rank == 0 and board.check(signed):
        board.set(confirmed, " ".join(board.get(key).decode() for key in signed))
    return board.check([confirmed]) and own in board.get(confirmed).decode().split()


def _who_is_missing(board: Store, start: str, size: int) -> str:
    if not start:
        return "rank 0 has not started; look at the log of its host"
    missing = [str(rank) for rank, key in enumerate(_signatures(start, size)) if not board.check([key])]
    if not missing:
        return "rank 0 did not start again; look at the log of its host"
    return f"rank {', '.join(missing)} of the newest start did not come; look at the logs of their hosts"


def _signatures(start: str, size: int) -> list[str]:
    return [f"{start}/signed/{rank}" for rank in range(size)]
