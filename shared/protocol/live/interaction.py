"""Live requests served to agents, what is said about them later, and what becomes of that."""

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
    "FateBatch",
    "Feedback",
    "FeedbackBatch",
    "FeedbackIds",
    "FeedbackStatus",
    "FinishReason",
    "Interaction",
    "InteractionStatus",
    "Redacted",
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
"""Most ids are canonical already: a tenth of what parsing them costs."""
_DIGEST = re.compile("([0-9a-f]{2})*").fullmatch
CANARY = "canary"
"""Why an answer to a conversation is not trained on that a version on trial answers."""
NOT_COMPARED = "canary_not_compared"
"""As ``CANARY``, of an answer that could not be trained on anyway: its reward says nothing of the trial either."""
CONSTRAINED = "constrained"
"""Why an answer is not trained on-policy that had to have a given form: a mask chose its tokens, with the policy."""
USER_TAG = "user_id"
"""The tag that names a user; stored as an HMAC, wherever it comes from."""
EPISODE_HEADER = "Penstock-Episode"
"""Header of an interaction's message: what an index of episodes needs without reading the interaction."""
RESTORED_HEADER = "Penstock-Restored"
"""Header of a message of FEEDBACK with what a deletion left of others: the sequences at which that stood before."""
SENDERS_HEADER = "Penstock-Senders"
"""Header of a message of FEEDBACK: bytes of its items by the number of the key that posted them: ``3f2:120 77a:4``."""
NUM_SENDERS = 4096
"""So many numbers are given to keys, so that who counts by them has a bound. Two keys may have the same one."""

TOO_LATE = "too_late"
"""Outcome of a revision of feedback that was decided before."""
MAX_TURNS = 1000
"""Turns of one episode, served or posted: those that come when it has so many are never trained on."""


class Redacted(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, stop) of a prompt or completion that were blanked before it was stored, and what they were."""

    part: Literal["prompt", "completion"]
    start: int
    stop: int
    name: str


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one served request, recorded where its tokens were sampled, before the client has the last of them.

    ``token_ids`` and ``logprobs`` are as long as each other; ``spans`` cover them. ``request`` is shared by the choices
    of one request: they are siblings of one prompt. ``episode`` is never empty: a request without one gets its own.
    ``user`` is an HMAC. ``untrainable`` names why the interaction may not be trained on; empty where it may.
    """

    id: str
    request: str
    index: int
    job: str
    episode: str
    alone: bool = False
    """The request named no episode: its own one is over with it."""
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
    """The field of the request that prescribed the form of the answer; its log-probs are the policy's all the same."""
    finish: FinishReason
    template: str
    """Digest of tokenizer and chat template."""
    body_digest: str
    """Digest of the request's body: the same again with a retry count is the same request."""
    text: str
    """The completion as the client saw it, for people and preference losses."""
    prompt: str = ""
    """The prompt as the policy read it, special tokens included, for people; empty where a record cannot hold it."""
    tool_calls_valid: bool | None = None
    """True if the completion's tool calls could be parsed; None where there are none."""
    calls: list[ToolCall] = []
    """Those that could."""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    redacted: list[Redacted] = []
    started: float
    first_token: float
    ended: float

    def row(self) -> dict[str, Any]:
        """The record as the API shows it: each span is `[version, start, end]`."""
        return {**msgspec.to_builtins(self), "spans": [[span.version, span.start, span.end] for span in self.spans]}


class Feedback(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One accepted item of feedback: durable in FEEDBACK before its sender has the 202.

    ``retraction`` takes back the item that ``body`` names; ``release`` and ``drop`` decide on one that is held back.
    ``metric`` is declared by the job, or `reward`, `comment`, `demonstration`. Exactly one of ``inference`` and
    ``episode`` names the target of kind `metric`; ``body`` holds what other kinds carry. A `preference` without
    ``inference`` is between texts: ``body`` has the prompt and ``answers``, the better one first. ``key_id`` is who
    posted it.
    ``user`` is an HMAC, as in Interaction. Ids are canonical UUIDs without prefix.
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
    """SHA-256 of the canonical body: the same id with another one is refused."""
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    seq: int = 0
    """Sequence of its message in FEEDBACK, as its readers know it: of two words the one that came later counts. It is
    stored only where a deletion stored an item anew, further on: then it says where it was."""


class FeedbackBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message of FEEDBACK: what arrived within a moment, in order.

    An id may come again: the first one counts, unless a later one has a higher revision.
    """

    items: list[Feedback]


def sender_number(key_id: str) -> int:
    """Number in [0, NUM_SENDERS) by which bytes of a key are counted."""
    return xxhash.xxh3_64_intdigest(key_id.encode()) % NUM_SENDERS


def senders_header(sizes: Iterable[tuple[str, int]]) -> str:
    """Value of SENDERS_HEADER for items of ``(key_id, bytes)``."""
    total: Counter[int] = Counter()
    for key_id, nbytes in sizes:
        total[sender_number(key_id)] += nbytes
    return " ".join(f"{number:x}:{nbytes}" for number, nbytes in total.items())


def senders_of(headers: Mapping[str, str]) -> dict[int, int]:
    """Bytes by number of key; empty where the header is absent or cannot be read."""
    try:
        pairs = (pair.split(":") for pair in headers.get(SENDERS_HEADER, "").split())
        return {int(number, 16) % NUM_SENDERS: max(0, int(nbytes)) for number, nbytes in pairs}
    except ValueError:
        return {}


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """Deletions of one user's data in one job, in FEEDBACK beside the feedback: ids only, which identify nobody.

    ``user`` is an HMAC. Neither the interactions nor the feedback exist any more; feedback on them is refused. What was
    admitted of the user's conversations by ``time`` (Unix seconds) goes, too, whether or not it is named.
    """

    user: str
    interactions: list[str]
    feedback: list[str]
    time: float


class FeedbackIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of feedback that was decided and is no longer in FEEDBACK: they are not accepted again.

    ``heads`` are the (kind, metric, key) that rows name by place; a row is (id of 16 bytes, fingerprint of 32 bytes,
    revision, Unix seconds when it was received, sequence where it stood, place of its head). About 65 bytes an item.
    """

    heads: list[tuple[str, str, str]]
    rows: list[tuple[bytes, bytes, int, float, int, int]]

    @classmethod
    def of(cls, items: Iterable[tuple[int, Feedback]]) -> FeedbackIds:
        """Of items, each with the sequence of its message; what no API took in (no canonical id) is left out."""
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
        """The items, without what they said, each with the sequence where it stood."""
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
"""Statuses that others follow."""


class FeedbackStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one item of feedback; the newest one of an id counts. Appended to DECISIONS, never changed.

    Final ones follow from the ledger.
    """

    feedback: str
    status: StatusName
    reason: str = ""
    interactions: list[str] = msgspec.field(default_factory=list)
    ordinal: int = -1
    """Place in the job's data order, once admitted."""
    batch: int = 0
    version: int = 0
    """Version that the batch made, once trained."""
    time: float
    revision: int = 0
    """With the reason ``TOO_LATE``: the revision that came too late. The status of the item stays as it is."""


class InteractionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status of one interaction. One with an ``ordinal`` follows from the ledger, and the newest of these counts;
    else the first one does.
    """

    interaction: str
    status: Literal["admitted", "rejected", "trained"]
    reason: str = ""
    ordinal: int = -1
    """Place in the job's data order, once admitted."""
    batch: int = 0
    version: int = 0
    """Version that the batch made, once trained."""
    time: float


class FateBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message of DECISIONS: the statuses of items and interactions that one decision gave, in order.

    The name of the class is the kind of the message on the bus.
    """

    items: list[FeedbackStatus]
    interactions: list[InteractionStatus] = []


def named_tags(tags: Mapping[str, str], pseudonym: Callable[[str], str]) -> dict[str, str]:
    """Tags as they may be stored: the user whom they name is a pseudonym."""
    return {name: pseudonym(value) if name == USER_TAG else value for name, value in tags.items()}


def named_users(user: str, tags: Mapping[str, str], pseudonym: Callable[[str], str]) -> set[str]:
    """Pseudonyms of all whom a stored record names. Earlier versions stored the tag as it was sent."""
    tag = tags.get(USER_TAG, "")
    return {user, tag, pseudonym(tag)} - {""}


def job_mark(job: str) -> int:
    """Common end of the ids of a job's interactions and episodes, by which feedback finds its job before its target."""
    return xxhash.xxh32_intdigest(job.encode())


def new_marked_id(job: str) -> str:
    """A UUIDv7 (canonical form) whose last 32 bits are the mark of ``job``."""
    value = uuid6.uuid7().int
    return str(uuid6.UUID(int=(value >> MARK_BITS << MARK_BITS) | job_mark(job)))


def marked_id(text: str) -> tuple[str, int] | None:
    """``(canonical UUID, mark)`` of an id with or without prefix (`chatcmpl-`, `cmpl-`, `ep_`); None: not an id."""
    bare = bare_id(text)
    if bare is None:
        return None
    return bare, uuid6.UUID(bare).int & ((1 << MARK_BITS) - 1)


def time_of_id(id: str) -> float | None:
    """When a canonical id was made (Unix seconds), as it tells; None of one that tells no time (not UUIDv7)."""
    number = uuid6.UUID(id)
    return (number.int >> 80) / 1000 if number.version == 7 else None


def bare_id(text: str) -> str | None:
    """The canonical UUID in ``text``; None where there is none."""
    if _CANONICAL(text) is not None:
        return text
    for prefix in ("chatcmpl-", "cmpl-", "ep_", "fb_"):
        text = text.removeprefix(prefix)
    try:
        return str(uuid6.UUID(text))
    except ValueError:
        return None
