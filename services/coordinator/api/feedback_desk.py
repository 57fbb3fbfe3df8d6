"""Feedback as the HTTP API uses it. Implemented in ``coordinator.feedback``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from penstock.services.coordinator.api.auth import Caller
from penstock.services.coordinator.api.backend.control import Row
from penstock.services.coordinator.api.http.replies import HttpProblem
from penstock.shared.protocol.live.interaction import Interaction

__all__ = ["FeedbackDesk", "HeldFeedback"]


class HeldFeedback(Protocol):
    """Feedback that is held back. ``show`` and ``decide`` raise NotFound, or Conflict: it is not held any more."""

    async def page(self, jobs: Sequence[str] | None, *, after: str, limit: int) -> list[Row]:
        """``HeldRow`` of each item of these jobs (None: of all), in the order of ids."""
        ...

    async def show(self, job: str, item: str) -> Row:
        """The same with ``value``, ``target``, ``weight``, ``user`` and ``revision``."""
        ...

    async def decide(self, job: str, item: str, verdict: Literal["release", "drop"], *, caller: Caller) -> Row:
        """Let it count, or reject it; on disk when this returns."""
        ...


class FeedbackDesk(Protocol):
    """Takes feedback and answers for it. Every method may raise Unavailable."""

    @property
    def held(self) -> HeldFeedback:
        """Items that are held back."""
        ...

    def pseudonym(self, user: str) -> str:
        """Pseudonym of a user in stored records; '' for no user. Raises Unavailable while it is not known yet."""
        ...

    async def post(self, posts: Sequence[Any], *, caller: Caller, key: str | None) -> list[Row | HttpProblem]:
        """Store validated posts (``FeedbackPost``); for each a ``FeedbackReply`` once it is on disk, or its refusal.

        ``key`` is the request's Idempotency-Key: posts without an id of their own get one from it and their place, so
        that the same request again has no second effect, whenever it comes. What was refused before is among them as
        its problem, and answered with it, for the others keep their places.
        """
        ...

    async def retract(self, feedback: str, *, caller: Caller) -> Row:
        """Take an item back (``RetractReply``). Raises NotFound."""
        ...

    async def fate(self, feedback: str) -> Row:
        """Status of an item (``FateReply``). Raises NotFound."""
        ...

    async def funnel(self, job: str) -> Row:
        """The feedback of a job, counted by metric, source and status (``Funnel``)."""
        ...

    async def consent(self, user: str, *, train: bool) -> Row:
        """Store what a user allows (``ConsentReply``)."""
        ...

    async def erase(self, user: str) -> Row:
        """Begin to delete a user's data, and report (``ErasureReply``)."""
        ...

    async def erasure(self, user: str) -> Row:
        """How far the deletion of a user's data is (``ErasureReply``). Raises NotFound."""
        ...

    async def episodes_of(self, interactions: Sequence[str]) -> dict[str, str]:
        """The episode of each interaction (canonical UUIDs, both) that is recorded in one with a UUID."""
        ...

    async def decisions(self, interactions: Sequence[str]) -> dict[str, Row]:
        """Decisions on those interactions (canonical UUIDs) that are decided (``InteractionDecision``)."""
        ...

    def after_end(self, record: Interaction) -> Row | None:
        """Decision on an undecided answer from after its job's end (``InteractionDecision``); else None."""
        ...

    async def turns(self, episode: str, *, after: str | None, limit: int) -> list[Row]:
        """The recorded interactions of an episode (canonical UUID) past the one ``after``, oldest first."""
        ...
