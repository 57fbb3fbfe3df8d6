"""Protocol of every rollout engine. Token ids in, token ids out; each token is labelled with its policy version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from penstock.services.rollout.held_weights import HeldWeights
from penstock.shared.protocol.generation import (
    Caps,
    Constraint,
    GenRequest,
    GenResult,
    PauseMode,
    Sample,
    Scores,
    Token,
    WeightInfo,
)
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Way

__all__ = ["Engine", "Listener", "Updatable", "UpdatableByReference", "UpdateMode"]

Listener = Callable[[Token], None]
"""Callback that receives the tokens of one request as they are sampled; called on the event loop, must not block."""

UpdateMode = Literal["swap", "in_place"]
"""swap: the staged tensors replace the weights. in_place: chunks are copied into the weights while decoding is
stopped."""


class Updatable(Protocol):
    """Holds the weights of a policy version and accepts updates; the part of an engine that ``PolicyFollower`` uses."""

    caps: Caps

    async def close(self) -> None:
        """Stop; requests in flight fail with ``Unavailable``. Safe to repeat."""
        ...

    async def begin_update(
        self,
        *,
        version: int,
        digest: str,
        mode: UpdateMode,
        guard: Callable[[], bool] | None = None,
        base: bool = False,
    ) -> None:
        """Open an update of the trained parameters: the LoRA adapter if the engine has one, else the whole weights.

        ``guard`` returns True while the staged memory is intact. After the commit the engine calls it before and after
        each decode step; if it returns False, the tokens of that step are discarded, running requests end as 'abort'
        and the engine is dirty.

        Args:
            base: update the frozen weights under the adapter instead, in place; the served version does not change.

        Raises:
            Conflict: another update is open, or ``base`` is set and the engine has no adapter.
        """
        ...

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Stage some of the parameters.

        Raises:
            WeightsError: a name is unknown, or a shape or dtype differs. This ends the update: in mode 'swap' the old
                version is still served, in mode 'in_place' the engine is dirty.
            Conflict: no update is open.
        """
        ...

    async def commit_update(self) -> float:
        """Serve the staged weights from the next token boundary on, and drop every cache computed with older weights.

        Returns:
            Seconds for which decoding was stopped.

        Raises:
            WeightsError: parameters are missing or the guard returns False. This ends the update, as in ``load_chunk``.
            Conflict: no update is open.
        """
        ...

    async def abort_update(self) -> None:
        """Discard the open update. Weights that were already partly overwritten in place become dirty. Safe to
        repeat."""
        ...

    async def weight_info(self) -> WeightInfo:
        """Return the served version."""
        ...


class UpdatableByReference(Updatable, Protocol):
    """Engine whose own processes open the weights of a version: ``caps.staging`` is 'reference'.

    ``load_chunk`` is not called: ``begin_update`` and ``commit_update`` use the version that was staged last.
    """

    async def stage(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version, verify its digest and hold it, while the engine keeps serving.

        The version is released when its update is committed or aborted, or when another version is staged.

        Args:
            routes: transport that the coordinator chose for each worker; None if it chose none.

        Returns:
            Transport by which the version was received, and the number of fetched bytes.

        Raises:
            WeightsError: the version is unreachable, damaged, or belongs to another model.
        """
        ...


class Engine(Updatable, Protocol):
    """A rollout engine. All methods are called from one event loop; none blocks it."""

    stop_ids: tuple[int, ...]
    """Tokens that end a completion: those of the tokenizer and of the model's generation config."""
    max_length: int
    """Maximum number of tokens of a prompt plus its completion."""

    @property
    def running(self) -> int:
        """Number of sequences being decoded."""
        ...

    @property
    def is_paused(self) -> bool:
        """True while ``pause`` or an update stops decoding, so that no progress is expected."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled since the start; grows while the engine makes progress."""
        ...

    async def start(self) -> None:
        """Start the engine; returns once it can serve."""
        ...

    async def health(self) -> dict[str, Any]:
        """Return counters and flags of the engine's state. Raises ``Unavailable`` if the engine can no longer serve."""
        ...

    async def generate(
        self, request: GenRequest, on_token: Listener | None = None, *, on_start: Callable[[], None] | None = None
    ) -> GenResult:
        """Complete a prompt ``request.n`` times. Cancelling the awaiting task frees the slots.

        A request waits while the engine is paused or updated in place. ``on_token`` receives the tokens in order,
        except the one that ends a sample as 'stop' or 'length'; the result, which follows, contains all of them.
        ``on_start`` is called once, on the event loop, when the first completion leaves the queue and joins the batch.

        Raises:
            ConfigError: this engine cannot serve the request (empty prompt, too long, unknown token); a
                ConstraintError if it cannot enforce the constraint of the request.
            Conflict: the request id is in use.
            WeightsError: the engine is dirty.
            Unavailable: the engine is closed, asleep or broken.
        """
        ...

    async def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint before ``generate`` is called, so that the caller learns of errors earlier.

        Raises:
            ConstraintError: this engine cannot enforce the constraint.
            Unavailable: too many other constraints are being compiled.
        """
        ...

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Return the log-prob of each token of a text except the first (from the logits, at temperature 1).

        Args:
            held: weights to compute them with; None: the served ones.

        Raises: as ``generate``.
        """
        ...

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all) as 'abort', with the tokens generated so far. Return their number."""
        ...

    async def written(self, request_ids: Collection[str]) -> dict[str, Sample]:
        """Return the tokens that these running requests have generated so far, by request id, as samples with finish
        'abort'. Each request must have n = 1.

        The requests continue. Completions that have ended are left out. If the engine learns only at the end which
        weights generated a token, a sample ends before the first token whose weights are uncertain.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding at a token boundary; new requests wait. Mode 'drain' first finishes all running requests."""
        ...

    async def resume(self) -> None:
        """Continue decoding after ``pause``. Safe to repeat."""
        ...

    async def sleep(self) -> None:
        """End all requests as 'abort' and release the cache memory; requests are rejected until ``wake``."""
        ...

    async def wake(self) -> None:
        """Accept requests again after ``sleep``. Safe to repeat."""
        ...
