"""Interactions of live agents, feedback on interactions, and the statuses of interactions and feedback."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
import uuid6
import xxhash

from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.inference import ToolCall

__all__ = [
    "CANARY",
    "CONSTRAINED",
    "EPISODE_HEADER",
    "MAX_TURNS",
    "NOT_COMPARED",
    "RESTORED_HEADER",
    "SENDERS_HEADER",
    "TOO_LATE",
    "UNDECIDED",
    "USER_TAG",
    "Erasure",
    "Feedback",
    "FeedbackBatch",
    "FeedbackIds",
    "FeedbackStatus",
    "FinishReason",
    "Interaction",
    "InteractionStatus",
    "Redacted",
    "StatusBatch",
    "StatusName",
    "bare_id",
    "job_mark",
    "marked_id",
    "named_tags",
    "named_users",
    "new_marked_id",
    "sender_number",
    "senders_header",
    "senders_of",
    "time_of_id",
]

FinishReason = Literal["stop", "length", "tool_calls", "abort", "client_disconnected"]
MARK_BITS = 32
_CANONICAL = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch
"""Matches a UUID in canonical form. Most ids have this form, and a match costs a tenth of parsing."""
_DIGEST = re.compile("([0-9a-f]{2})*").fullmatch
CANARY = "canary"
"""Reason why an answer is not trained on: a version in a canary trial produced it."""
NOT_COMPARED = "canary_not_compared"
"""Reason why an answer is not trained on: a version in a canary trial produced it, and its reward does not count in the
trial, because it could not have been trained on anyway."""
CONSTRAINED = "constrained"
"""Reason why an answer is not trained on-policy: a mask for a prescribed form influenced its tokens."""
USER_TAG = "user_id"
"""Tag that names a user; stored as an HMAC, whatever its source."""
EPISODE_HEADER = "Penstock-Episode"
"""Header of an interaction's message with the data that the episode index needs, so that readers need no payload."""
RESTORED_HEADER = "Penstock-Restored"
"""Header with the stream sequence numbers of the original messages, in a message in FEEDBACK that replaces messages
after a deletion."""
SENDERS_HEADER = "Penstock-Senders"
"""Header of a message in FEEDBACK: how many bytes of its items each key posted, as ``3f2:120 77a:4`` with the keys'
sender numbers."""
NUM_SENDERS = 4096
"""Number of different sender numbers, which bounds the size of statistics by sender. Two keys may have the same
number."""

TOO_LATE = "too_late"
"""Reason why a revision of feedback is rejected: the feedback was decided before."""
MAX_TURNS = 1000
"""Largest number of turns of one episode, served or posted; later turns are never trained on."""


class Redacted(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, stop) of a prompt or completion that were redacted before storage, and the name of the pattern."""

    part: Literal["prompt", "completion"]
    start: int
    stop: int
    name: str


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a served request. The worker that sampled the choice stores this record before it sends the last
    token to the client.

    ``token_ids`` and ``logprobs`` have the same length; ``spans`` cover them. ``request`` is shared by the choices of
    one request: they are siblings of one prompt. ``episode`` is never empty: a request without one gets its own.
    ``user`` is an HMAC. ``untrainable`` is the reason why the interaction may not be trained on; empty if it may.
    """

    id: str
    request: str
    index: int
    job: str
    episode: str
    alone: bool = False
    """True if the request named no episode; it then forms an episode by itself."""
    key_id: str
    user: str
    split: Literal["train", "val"]
    untrainable: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    sampling: Sampling
    constraint: Literal["", "response_format", "tool_choice"] = ""
    """Field of the request that prescribed the form of the answer; the log-probs are still those of the policy without
    the prescription."""
    finish: FinishReason
    template: str
    """Digest of tokenizer and chat template."""
    body_digest: str
    """Digest of the request's body, by which a client's retry is recognised as the same request."""
    text: str
    """Completion as the client saw it, for display and preference losses."""
    prompt: str = ""
    """Prompt as the policy read it, special tokens included, for display; empty if it exceeds the size of a record."""
    tool_calls_valid: bool | None = None
    """True if the completion's tool calls could be parsed; None if there are none."""
    calls: list[ToolCall] = []
    """Parsed tool calls."""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    redacted: list[Redacted] = []
    started: float
    first_token: float
    ended: float

    def row(self) -> dict[str, Any]:
        """Return the record as the API shows it: each span is `[version, start, end]`."""
        return {**msgspec.to_builtins(self), "spans": [[span.version, span.start, span.end] for span in self.spans]}


class Feedback(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One accepted item of feedback. FEEDBACK stores the item durably before its sender receives HTTP 202.

    An item of kind `retraction` withdraws the item that ``body`` names; `release` and `drop` end the quarantine of an
    item. ``metric`` is declared by the job, or `reward`, `comment`, `demonstration`. Exactly one of ``inference`` and
    ``episode`` is the target of kind `metric`; ``body`` has the content of other kinds. A `preference` without
    ``inference`` compares texts: ``body`` has the prompt and ``answers``, the better one first. ``key_id`` is the
    posting key. ``user`` is an HMAC, as in Interaction. Ids are canonical UUIDs without prefix.
    """

    id: str
    job: str
    kind: Literal["metric", "interaction", "preference", "correction", "retraction", "release", "drop"]
    key_id: str
    received: float
    user: str = ""
    revision: int = 0
    inference: str = ""
    episode: str = ""
    metric: str = ""
    value: bool | float | str | None = None
    weight: float = 1.0
    final: bool = False
    turn: int = -1
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    fingerprint: str = ""
    """SHA-256 of the canonical body; the same id with another fingerprint is rejected."""
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    seq: int = 0
    """Stream sequence number of the item's message in FEEDBACK: of two conflicting items the later one counts. Readers
    set this field. It is stored only with an item that a deletion rewrote at a higher number, as the original one."""


class FeedbackBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the stream FEEDBACK: feedback items that were stored together, in order.

    An id may repeat: the first item counts, unless a later one has a higher revision.
    """

    items: list[Feedback]


def sender_number(key_id: str) -> int:
    """Return the sender number, in [0, NUM_SENDERS), of an API key. The bytes posted with the key are counted under
    this number."""
    return xxhash.xxh3_64_intdigest(key_id.encode()) % NUM_SENDERS


def senders_header(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the value of the header SENDERS_HEADER: the sum of bytes by sender number, for items ``(key_id,
    bytes)``."""
    total: Counter[int] = Counter()
    for key_id, nbytes in sizes:
        total[sender_number(key_id)] += nbytes
    return " ".join(f"{number:x}:{nbytes}" for number, nbytes in total.items())


def senders_of(headers: Mapping[str, str]) -> dict[int, int]:
    """Parse the header SENDERS_HEADER to a dict of bytes by sender number; empty if the header is absent or invalid."""
    try:
        pairs = (pair.split(":") for pair in headers.get(SENDERS_HEADER, "").split())
        return {int(number, 16) % NUM_SENDERS: max(0, int(nbytes)) for number, nbytes in pairs}
    except ValueError:
        return {}


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """Record, stored in FEEDBACK, that one user's data in one job was deleted. It contains only ids, which identify no
    person.

    ``user`` is an HMAC. The interactions and feedback no longer exist; feedback on them is rejected. Whatever was
    admitted of the user's conversations before ``time`` (Unix seconds) is deleted, too, even if not listed.
    """

    user: str
    interactions: list[str]
    feedback: list[str]
    time: float


class FeedbackIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of decided feedback items that were removed from FEEDBACK; a feedback item posted again under one of these
    ids has no effect.

    ``heads`` are (kind, metric, key) triples, which rows refer to by index; a row is (id of 16 bytes, fingerprint of 32
    bytes, revision, receive time in Unix seconds, stream sequence number of the original message, index of its head).
    About 65 bytes per item.
    """

    heads: list[tuple[str, str, str]]
    rows: list[tuple[bytes, bytes, int, float, int, int]]

    @classmethod
    def of(cls, items: Iterable[tuple[int, Feedback]]) -> FeedbackIds:
        """Pack pairs ``(stream sequence number of the item's message, item)``. Leave out items whose id is not a
        canonical UUID: no API accepts such ids, so they cannot be posted again."""
        heads: dict[tuple[str, str, str], int] = {}
        rows = []
        for seq, item in items:
            if bare_id(item.id) == item.id and _DIGEST(item.fingerprint) is not None:
                head = heads.setdefault((item.kind, item.metric, item.key_id), len(heads))
                fingerprint = bytes.fromhex(item.fingerprint)
                id = uuid6.UUID(item.id).bytes
                rows.append((id, fingerprint, item.revision, item.received, item.seq or seq, head))
        return cls(heads=list(heads), rows=rows)

    def items(self, job: str) -> list[tuple[int, Feedback]]:
        """Return the items as ``(stream sequence number of its original message, item)``. The items have no content,
        because only ids were kept."""
        found = []
        for id, fingerprint, revision, received, seq, head in self.rows:
            kind, metric, key_id = self.heads[head]
            item = Feedback(
                id=str(uuid6.UUID(bytes=id)), job=job, kind=kind, metric=metric, key_id=key_id, received=received,  # type: ignore[arg-type]
                revision=revision, fingerprint=fingerprint.hex(),
            )  # fmt: skip
            found.append((seq, item))
        return found


StatusName = Literal["received", "matched", "admitted", "quarantined", "rejected", "expired", "retracted", "trained"]


UNDECIDED = frozenset({"received", "matched", "quarantined"})
"""Statuses of feedback that are not final."""


class FeedbackStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one item of feedback, appended to DECISIONS and never changed. If an item has several statuses, the
    newest one counts.

    Final statuses follow from the ledger.
    """

    feedback: str
    status: StatusName
    reason: str = ""
    interactions: list[str] = msgspec.field(default_factory=list)
    ordinal: int = -1
    """Position of the item's draw in the job's data order; -1 before the item is admitted."""
    batch: int = 0
    version: int = 0
    """Policy version that training on the item produced; 0 before the item is trained."""
    time: float
    revision: int = 0
    """Number of the revision that was rejected as ``TOO_LATE``. The status of the item itself is unchanged."""


class InteractionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the statuses that an interaction gets over time. Each status from the admission on has an ``ordinal``, and
    the newest of these counts. If no status has an ``ordinal``, the oldest status counts."""

    interaction: str
    status: Literal["admitted", "rejected", "trained"]
    reason: str = ""
    ordinal: int = -1
    """Position of the interaction's draw in the job's data order; -1 before the interaction is admitted."""
    batch: int = 0
    version: int = 0
    """Policy version that training on the interaction produced; 0 before the interaction is trained."""
    time: float


class StatusBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message of DECISIONS: statuses of items and interactions set by one decision, in order.

    The name of the class is the kind of the message on the bus.
    """

    items: list[FeedbackStatus]
    interactions: list[InteractionStatus] = []


def named_tags(tags: Mapping[str, str], pseudonym: Callable[[str], str]) -> dict[str, str]:
    """Return the tags as they may be stored, with the user's name replaced by a pseudonym."""
    return {name: pseudonym(value) if name == USER_TAG else value for name, value in tags.items()}


def named_users(user: str, tags: Mapping[str, str], pseudonym: Callable[[str], str]) -> set[str]:
    """Return the pseudonyms of all users in a stored record with ``user`` and ``tags``.

    The result has the user tag both as it is and as its pseudonym, because earlier versions stored the name itself.
    """
    tag = tags.get(USER_TAG, "")
    return {user, tag, pseudonym(tag)} - {""}


def job_mark(job: str) -> int:
    """Return the 32-bit suffix shared by all ids of a job's interactions and episodes. It lets the coordinator find the
    job of a feedback item even before the item's target is stored."""
    return xxhash.xxh32_intdigest(job.encode())


def new_marked_id(job: str) -> str:
    """Return a new UUIDv7 (canonical form) whose last 32 bits are ``job_mark(job)``."""
    value = uuid6.uuid7().int
    return str(uuid6.UUID(int=(value >> MARK_BITS << MARK_BITS) | job_mark(job)))


def marked_id(text: str) -> tuple[str, int] | None:
    """Parse an id with or without prefix (`chatcmpl-`, `cmpl-`, `ep_`, `fb_`); return ``(canonical UUID, its last 32
    bits)``, or None if ``text`` is not an id."""
    bare = bare_id(text)
    if bare is None:
        return None
    return bare, uuid6.UUID(bare).int & ((1 << MARK_BITS) - 1)


def time_of_id(id: str) -> float | None:
    """Return the creation time in a canonical id (Unix seconds); None if the id is not a UUIDv7."""
    number = uuid6.UUID(id)
    return (number.int >> 80) / 1000 if number.version == 7 else None


def bare_id(text: str) -> str | None:
    """Return the UUID in ``text``, without its prefix and in canonical form; None if ``text`` is not an id."""
    if _CANONICAL(text) is not None:
        return text
    for prefix in ("chatcmpl-", "cmpl-", "ep_", "fb_"):
        text = text.removeprefix(prefix)
    try:
        return str(uuid6.UUID(text))
    except ValueError:
        return None
