"""Decisions on live interactions and feedback."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.shared.protocol.events.base import Event
from penstock.shared.protocol.objective import Objective

__all__ = [
    "Admission",
    "Admitted",
    "Decided",
    "EndedFeedback",
    "EndedInteractions",
    "PackedIds",
    "Quarantined",
]

ID_BYTES, ID_LENGTH = 16, 36
DIGITS = [place for place in range(ID_LENGTH) if place not in (8, 13, 18, 23)]
"""Places of the digits in the text of a UUID."""


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


class PackedIds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ids of items, 16 bytes each. ``texts`` has those that are no UUID in canonical form; no API takes such."""

    packed: bytes = b""
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[str]) -> PackedIds:
        """Pack ids."""
        packed, texts = [], []
        for id in ids:
            data = _id_bytes(id)
            if data is None:
                texts.append(id)
            else:
                packed.append(data)
        return cls(b"".join(packed), tuple(texts))

    def __len__(self) -> int:
        return len(self.packed) // ID_BYTES + len(self.texts)

    def __add__(self, other: PackedIds) -> PackedIds:
        return PackedIds(self.packed + other.packed, self.texts + other.texts)

    def unpack(self) -> list[str]:
        """Return the ids. Digits move by columns, in half the time that slices of each id take."""
        digits = self.packed.hex().encode()
        found = bytearray(b"-") * (len(self.packed) // ID_BYTES * ID_LENGTH)
        for place, column in enumerate(DIGITS):
            found[column::ID_LENGTH] = digits[place :: 2 * ID_BYTES]
        text = found.decode()
        return [*(text[at : at + ID_LENGTH] for at in range(0, len(text), ID_LENGTH)), *self.texts]


def _id_bytes(id: str) -> bytes | None:
    """Return the bytes of a UUID in canonical form, or None."""
    digits = id.replace("-", "")
    if len(digits) != 2 * ID_BYTES or not digits.isalnum() or digits.lower() != digits:
        return None
    if len(id) != len(digits) + 4 or not id[8] == id[13] == id[18] == id[23] == "-":
        return None
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None


class EndedFeedback(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Items of feedback that end without training, all with one status and reason.

    ``revision`` is set where only that revision, which came too late, is refused. ``time`` is set where an item may
    count again if it is revised later; 0 is the time of the entry. Where ``others`` has an id for each item, it follows
    the reason: an item is retracted `by` it, or `retracts` it.
    """

    ids: PackedIds
    status: str
    reason: str
    revision: int = 0
    time: float = 0.0
    others: PackedIds = PackedIds()


class EndedInteractions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Interactions that are never trained, all for one reason."""

    ids: PackedIds
    reason: str


class Decided(Event, frozen=True, kw_only=True, tag=True):
    """Live items end without training: feedback is rejected, expired or retracted, interactions are refused.

    ``episodes`` are the posted episodes that closed with them, 16 bytes each: the xxh3-128 of the key and the name. The
    leader had read INTERACTIONS and FEEDBACK below the sequences ``read_to`` when it decided.
    """

    feedback: list[EndedFeedback] = []
    interactions: list[EndedInteractions] = []
    episodes: bytes = b""
    read_to: tuple[int, int] = (1, 1)
