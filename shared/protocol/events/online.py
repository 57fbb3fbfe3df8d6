"""Ledger events of online jobs: decisions on live interactions and feedback, decisions of the promotion gate, and
canary trials of new versions."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.shared.protocol.events.base import Event
from penstock.shared.protocol.objective import Objective

__all__ = [
    "Admission",
    "Admitted",
    "CanaryBegun",
    "CanaryJudged",
    "Decided",
    "EndedFeedback",
    "EndedInteractions",
    "Judged",
    "PackedIds",
    "Promoted",
    "PromotionRefused",
    "Quarantined",
]

ID_BYTES, ID_LENGTH = 16, 36
DIGITS = [place for place in range(ID_LENGTH) if place not in (8, 13, 18, 23)]
"""Positions of the digits in the text of a UUID."""


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """One draw of an online job: turns of an episode that no earlier draw trained on, and the feedback on these turns.

    ``interactions`` (in turn order) and ``feedback`` map ids to stream sequence numbers. ``reward`` is the return of
    the turns; ``lag`` the number of versions between the oldest token and the next update. ``key_id`` is the key
    whose feedback set the reward, ``user`` the user of the conversation. ``reason`` names the origin of the reward:
    `feedback`, `default`, `invalid`, `credit` (only feedback on later turns). ``time`` is the time of admission.

    ``objective`` is the loss. ``context`` are interactions that the draw only refers to: one that feedback corrects, or
    two that it compares; each may be admitted by itself, too. Without ``interactions``, the feedback contains the text,
    and ``version`` is the policy version that the text is attributed to (-1: any). ``bucket`` is the kind of prompt for
    the baselines of ``ValueTracker``. ``group`` is an id shared by answers that are compared with each other.
    ``origin`` has episode and request of such an answer, because turns of one episode are not compared; for posted
    turns, it has their episode and feedback ids.

    ``weight`` scales the advantages: it is ``share``, times a factor below 1 if a new source judged the answer.
    ``share`` is the weight of the draw within its episode (0 in ledgers of earlier versions: means 1). ``compared`` has
    ``(key, its reward, mean reward of the reference keys)`` for each metric and target that both judged.

    ``judges`` are all keys whose feedback contributes to the reward, ``askers`` those that requested the answers,
    ``users`` the users of the conversations if there may be several; empty: ``user``. ``refused`` maps turns of the
    same episode that are never trained on to the reason.
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
    """Live interactions were admitted to training. Each admission opens one draw, in the same ledger entry.

    All items with stream sequence numbers below ``low_interactions`` and ``low_feedback`` are decided; a new leader
    reads the streams from these numbers on.
    """

    admissions: list[Admission]
    low_interactions: int
    low_feedback: int


class Quarantined(Event, frozen=True, kw_only=True, tag=True):
    """Feedback is held until a user releases or drops it. ``items`` maps the id of each item to its stream sequence
    number in FEEDBACK."""

    items: dict[str, int]


class PackedIds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Packed ids of items, 16 bytes each. ``texts`` has the ids that are not canonical UUIDs; usually there are none,
    because no API accepts such ids."""

    packed: bytes = b""
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[str]) -> PackedIds:
        """Return ``ids`` in packed form."""
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
        """Return the ids; the ids in ``texts`` come last."""
        # Each step copies one digit of all ids, which takes half the time of slicing each id.
        digits = self.packed.hex().encode()
        found = bytearray(b"-") * (len(self.packed) // ID_BYTES * ID_LENGTH)
        for place, column in enumerate(DIGITS):
            found[column::ID_LENGTH] = digits[place :: 2 * ID_BYTES]
        text = found.decode()
        return [*(text[at : at + ID_LENGTH] for at in range(0, len(text), ID_LENGTH)), *self.texts]


def _id_bytes(id: str) -> bytes | None:
    """Return the bytes of ``id`` if it is a UUID in canonical form, else None."""
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
    """Feedback items that end without training, all with one status and reason.

    If only one revision is rejected, because it came too late, ``revision`` is its number. ``time`` is the time at
    which the items ended, if a later revision of them may count again; 0: the time of the ledger entry.
    ``others`` is empty, or has a second item's id for each item. In the latter case the reason is `by` (the second item
    retracted the first) or `retracts` (the first retracts the second).
    """

    ids: PackedIds
    status: str
    reason: str
    revision: int = 0
    time: float = 0.0
    others: PackedIds = PackedIds()


class EndedInteractions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Interactions that are never trained on, all for one reason."""

    ids: PackedIds
    reason: str


class Decided(Event, frozen=True, kw_only=True, tag=True):
    """Live items end without training: feedback is rejected, expired or retracted, interactions are refused.

    ``episodes`` has the posted episodes that closed in this decision, 16 bytes each: the xxh3-128 of API key id and
    episode name. When the leader decided, it had read INTERACTIONS and FEEDBACK below the stream sequence numbers
    ``read_to``.
    """

    feedback: list[EndedFeedback] = []
    interactions: list[EndedInteractions] = []
    episodes: bytes = b""
    read_to: tuple[int, int] = (1, 1)


class Promoted(Event, frozen=True, kw_only=True, tag=True):
    """Policy ``version``, made by the update of batch ``number``, is served from now on. Needs a promotion gate.

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
    """Start of a canary trial: ``version`` met every bound (``figures`` are its measured values) and now answers a
    ``share`` of the conversations.

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
    """Reward of one conversation during a canary trial. If feedback on one turn does not affect other turns, each
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
    """Conversations were judged during a canary trial of ``version``: conversations with this version, and
    conversations with the served version."""

    version: int
    judged: list[Judged]
