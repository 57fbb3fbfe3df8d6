"""Decisions on live interactions and feedback."""

from __future__ import annotations

import msgspec

from penstock.shared.protocol.events.base import Event
from penstock.shared.protocol.objective import Objective

__all__ = ["Admission", "Admitted", "Quarantined"]


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """Contents of one draw of an online job: turns of an episode that were not trained before, and their feedback.

    ``interactions`` (in turn) and ``feedback`` map ids to sequences in their streams. ``reward`` is the return of the
    turns; ``lag`` how many versions lie between the oldest token and the update that was next. ``key_id`` and ``user``
    say whose feedback, on whose conversation, decided; ``reason`` says by which rule: `feedback`, `default`, `invalid`,
    `credit` (only what was said of later turns). ``time`` is when it was admitted.

    ``objective`` says which loss it is for. ``context`` are interactions that it only refers to: one that is corrected,
    or two that are compared; each may be admitted for itself, too. Without ``interactions`` the material is in the
    feedback; ``version`` is the policy version that it is taken to be from, -1: any. ``bucket``: the
    kind of prompt, where values are tracked. ``group``: what answers have in common that are compared with each other;
    ``origin``: episode and request of such an answer, for turns of one episode are not; of posted turns, their episode
    and their items.

    ``weight`` scales its advantages: ``share``, what it weighs beside the rest of its episode (0: of an earlier build,
    as 1), times less than 1 where a source that is not known yet judged. ``compared`` is what sources
    said and what the reference keys said of the same: ``(key, reward, reward)``.

    ``judges`` are all keys whose feedback the reward comes from, ``askers`` those that the answers were served to,
    ``users`` whose conversations they are from where there may be several; empty: ``user``. ``refused`` are turns of
    the same episode that are never trained on, by id, and why.
    """

    ordinal: int
    interactions: dict[str, int]
    feedback: dict[str, int]
    reward: float
    lag: int
    key_id: str
    user: str
    reason: str
    time: float
    objective: Objective = "policy"
    context: dict[str, int] = {}
    judges: list[str] = []
    askers: list[str] = []
    version: int = -1
    bucket: str = ""
    users: list[str] = []
    weight: float = 1.0
    compared: list[tuple[str, float, float]] = []
    group: str = ""
    origin: list[str] = []
    share: float = 0.0
    refused: dict[str, str] = {}


class Admitted(Event, frozen=True, kw_only=True, tag=True):
    """Live interactions were admitted to training: one draw each, opened in the same decision.

    Below ``low_interactions`` and ``low_feedback`` (sequences) everything is decided: a new leader reads from there.
    """

    admissions: list[Admission]
    low_interactions: int
    low_feedback: int


class Quarantined(Event, frozen=True, kw_only=True, tag=True):
    """Feedback is held back until somebody releases or drops it: id -> sequence in FEEDBACK."""

    items: dict[str, int]
