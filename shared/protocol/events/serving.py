"""Decisions on which version is served: the gate, and trials on live traffic."""

from __future__ import annotations

import msgspec

from penstock.shared.protocol.events.base import Event

__all__ = ["CanaryBegun", "CanaryJudged", "Judged", "Promoted", "PromotionRefused"]


class Promoted(Event, frozen=True, kw_only=True, tag=True):
    """``version``, whose weights batch ``number`` made, is served from now on. Only of jobs with a promotion gate.

    ``figures`` is what was measured of it; ``reason`` is initial, passed, canary timed out, by request, rolled back, or
    measured: it was served already, and only now its held-out reward is known.
    """

    version: int
    number: int
    digest: str
    reason: str
    figures: dict[str, float] = {}


class PromotionRefused(Event, frozen=True, kw_only=True, tag=True):
    """``version`` is not served: ``reason`` names the bounds that it breaks, ``figures`` is what was measured of it."""

    version: int
    number: int
    reason: str
    figures: dict[str, float] = {}


class CanaryBegun(Event, frozen=True, kw_only=True, tag=True):
    """``version`` kept every bound on ``figures``: it answers ``share`` of the conversations until it is decided on.

    ``served``: the version that answers the others. Nothing is sealed until ``Promoted``, ``PromotionRefused`` or a
    fork ends it.
    """

    version: int
    number: int
    digest: str
    served: int
    share: float
    figures: dict[str, float] = {}


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """Reward of one conversation, or without credit over turns of one answer, while a version was tried.

    ``interactions`` are its answers, all by the version of its arm; ``judges``, ``askers`` and ``users`` own it, as in
    ``Admission``.
    """

    conversation: str
    is_canary: bool
    reward: float
    interactions: list[str]
    judges: list[str]
    askers: list[str]
    users: list[str]


class CanaryJudged(Event, frozen=True, kw_only=True, tag=True):
    """Conversations of both arms were judged while ``version`` is tried."""

    version: int
    judged: list[Judged]
