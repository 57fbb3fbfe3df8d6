"""Protocol of every rollout engine. Tokens in, tokens out; each token is labelled with its policy version."""

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
    Scores,
    Token,
    WeightInfo,
)
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Way

__all__ = ["Engine", "Listener", "Updatable", "UpdatableByReference", "UpdateMode"]

Listener = Callable[[Token], None]
"""Takes the tokens of one request as they are sampled; called on the event loop, must be quick."""

UpdateMode = Literal["swap", "in_place"]
"""swap: the staged tensors become the weights. in_place: chunks are copied into the weights while nothing decodes."""


class Updatable(Protocol):
    """Holds the weights of a policy version and takes in others: what a ``PolicyFollower`` needs of an engine."""

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
        """Open an update of what is trained: the adapter where the engine has one, else the whole weights.

        ``guard`` says whether the staged memory is still intact. It is asked around each decode step once the update is
        committed; when it says no, the tokens of that step are thrown away, running requests end as 'abort' and the
        engine is dirty.

        Args:
            base: update the frozen weights under the adapter instead, in place; the version that is served stays.

        Raises:
            Conflict: another update is open, or ``base`` where there is no adapter.
        """
        ...

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Stage some of the parameters.

        Raises:
            WeightsError: an unknown name, another shape or type. The update is over: a swap leaves the old version
                in service, an update in place leaves the engine dirty.
            Conflict: no update is open.
        """
        ...

    async def commit_update(self) -> float:
        """Make the staged weights current at a token boundary and drop every cache of older ones.

        Returns:
            Seconds for which decoding stood still.

        Raises:
            WeightsError: parameters are missing or the guard says no. The update is over, as in ``load_chunk``.
            Conflict: no update is open.
        """
        ...

    async def abort_update(self) -> None:
        """Give the open update up. After a chunk was copied in place the engine is dirty. Safe to repeat."""
        ...

    async def weight_info(self) -> WeightInfo:
        """The version that is served."""
        ...


class UpdatableByReference(Updatable, Protocol):
    """Takes in versions that its own processes open: an engine whose ``caps.staging`` is 'reference'.

    ``load_chunk`` is not called: between ``begin_update`` and ``commit_update`` stands what was staged last.
    """

    async def stage(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version, hold it and prove its digest, while the engine serves on.

        It is let go of when its update is committed or given up, or another one is staged.

        Args:
            routes: which transport the coordinator chose for each worker, if it did.

        Raises:
            WeightsError: it cannot be reached, is damaged, or is of another model.
        """
        ...


class Engine(Updatable, Protocol):
    """A rollout engine. All methods are called from one event loop; none blocks it."""

    stop_ids: tuple[int, ...]
    """Tokens that end a completion: the tokenizer's and those of the model's generation config."""
    max_length: int
    """Most tokens of a prompt and its completion together."""

    @property
    def running(self) -> int:
        """Sequences that are being decoded."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start: grows while the engine makes progress."""
        ...

    async def start(self) -> None:
        """Make the engine ready to serve."""
        ...

    async def health(self) -> dict[str, Any]:
        """State for people and probes. Raises ``Unavailable`` where the engine cannot serve any more."""
        ...

    async def generate(
        self, request: GenRequest, on_token: Listener | None = None, *, on_start: Callable[[], None] | None = None
    ) -> GenResult:
        """Complete a prompt ``request.n`` times. Cancelling the awaiting task frees the slots.

        A request is held while the engine is paused or updated in place. ``on_token`` is given every token but the one
        that ends a sample, in order, before the result, which has them all. ``on_start`` is called once, on the event
        loop, when the first completion leaves the queue and joins the batch.

        Raises:
            ConfigError: the request cannot be served by this engine (empty prompt, too long, unknown token); a
                ConstraintError where the form of its answer cannot be kept to.
            Conflict: the id is in use.
            WeightsError: the engine is dirty.
            Unavailable: the engine is closed, asleep or broken.
        """
        ...

    async def prepare(self, constraint: Constraint) -> None:
        """Make ready for answers of a form; ``generate`` does it, too, but says late that it cannot be done.

        Raises:
            ConstraintError: there can be no such answer here.
            Unavailable: too many other forms are made ready.
        """
        ...

    async def score(
        self, token_ids: Sequence[int], *, top_logprobs: int = 0, held: HeldWeights | None = None
    ) -> Scores:
        """Log-probs (of the logits, temperature 1) of the tokens of a text after its first one.

        Args:
            held: the weights to compute them with; None: those that are served.

        Raises: as ``generate``.
        """
        ...

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all) with what they have; they answer with finish 'abort'. Returns how many."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding at a token boundary; new requests are held. 'drain' returns when the running ones are done."""
        ...

    async def resume(self) -> None:
        """Undo ``pause``. Safe to repeat."""
        ...

    async def sleep(self) -> None:
        """End what runs as 'abort' and give the cache memory back; requests are refused until ``wake``."""
        ...

    async def wake(self) -> None:
        """Undo ``sleep``. Safe to repeat."""
        ...
