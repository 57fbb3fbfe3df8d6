"""Ledger events about served versions: promotion gate and canary trials."""

from __future__ import annotations

import msgspec

from penstock.shared.protocol.events.base import Event

__all__ = ["CanaryBegun", "CanaryJudged", "Judged", "Promoted", "PromotionRefused"]


class Promoted(Event, frozen=True, kw_only=True, tag=True):
    """``version``, which batch ``number`` produced, is served from now on. Only in jobs with a promotion gate.

    ``figures`` are the measured values of the version. ``reason`` is initial, passed, canary timed out, by request,
    rolled back, or measured. The last one means that the version was already served, and that its held-out reward is
    known only now.
    """

    version: int
    number: int
    digest: str
    reason: str
    figures: dict[str, float] = {}


class PromotionRefused(Event, frozen=True, kw_only=True, tag=True):
    """The promotion gate refused to serve ``version``: ``reason`` names the violated bounds, ``figures`` are the
    measured values."""

    version: int
    number: int
    reason: str
    figures: dict[str, float] = {}


class CanaryBegun(Event, frozen=True, kw_only=True, tag=True):
    """Start of a canary trial: ``version`` met every bound on ``figures`` and answers ``share`` of the conversations.

    ``served``: the version that answers the others. No batch is sealed until ``Promoted``, ``PromotionRefused`` or a
    fork ends the trial.
    """

    version: int
    number: int
    digest: str
    served: int
    share: float
    figures: dict[str, float] = {}


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """Reward of one conversation during a canary trial. In jobs in which turns get no credit from each other, each
    answer counts as a conversation.

    ``interactions`` are its answers, all by one version: the one on trial if ``is_canary``, else the served one.
    ``judges``, ``askers`` and ``users`` are as in ``Admission``.
    """

    conversation: str
    is_canary: bool
    reward: float
    interactions: list[str]
    judges: list[str]
    askers: list[str]
    users: list[str]


class CanaryJudged(Event, frozen=True, kw_only=True, tag=True):
    """Conversations were judged during a canary trial of ``version``: some with that version, some with the served
    one."""

    version: int
    judged: list[Judged]
