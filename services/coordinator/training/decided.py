"""Keeps the ids of decided live items, as recorded in the ledger, in blocks of packed ids. Pure.

A new leader reads INTERACTIONS and FEEDBACK again from the ledger's low-water marks. It must decide nothing twice, and
it must recognize late items. So the ledger's state keeps the ids decided above the marks, and the newest ``MIN_KEPT``
below them. Blocks of about the same size merge, so that a state has few of them, and a decision costs amortized O(log
n) copies of its ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash
from msgspec.structs import replace

from penstock.shared.protocol.events import Admission, Decided, EndedFeedback, EndedInteractions, PackedIds

__all__ = [
    "ADMITTED",
    "QUARANTINE_PREFIX",
    "RETRACTED_BY",
    "RETRACTS",
    "DecidedBlock",
    "block_of_admissions",
    "block_of_decision",
    "episode_digest",
    "final_ids",
    "is_quarantine_rejection",
    "reasons_of",
    "with_block",
]

ADMITTED = "admitted"
QUARANTINE_PREFIX = "quarantine_"
"""Prefix of the reasons for which the quarantine rejects an item."""
RETRACTED_BY, RETRACTS = "by", "retracts"
"""First words of reasons: a retracted item has the reason `by ID`, with the id of its retraction; the retraction has
the reason `retracts ID`, with the id of the item."""
MIN_KEPT, MAX_KEPT = 100_000, 1_000_000
"""Numbers of newest decided items that a state keeps: at least ``MIN_KEPT``, even below the low-water marks, and about
``MAX_KEPT`` at most. It drops older ones."""
MAX_BLOCK = 65_536
"""Number of items above which blocks no longer merge."""
DIGEST_BYTES = 16


def episode_digest(episode: str) -> bytes:
    """Return the digest that replaces the key of a posted episode in the ledger, which contains no names chosen by
    clients."""
    return xxhash.xxh3_128_digest(episode.encode())


@dataclass(frozen=True, slots=True)
class DecidedBlock:
    """Live items and episodes that were decided one after the other; see ``Decided`` for the fields.

    ``feedback`` also has items with the status `admitted` that the low-water mark has passed.
    """

    feedback: tuple[EndedFeedback, ...] = ()
    interactions: tuple[EndedInteractions, ...] = ()
    episodes: bytes = b""
    read_to: tuple[int, int] = (1, 1)
    count: int = 0
    """Number of items and episodes."""

    @classmethod
    def of(
        cls,
        feedback: Sequence[EndedFeedback],
        interactions: Sequence[EndedInteractions],
        episodes: bytes,
        read_to: tuple[int, int],
    ) -> DecidedBlock:
        """Build a block and count its items."""
        ids = [*(one.ids for one in feedback), *(one.ids for one in interactions)]
        count = sum(map(len, ids)) + len(episodes) // DIGEST_BYTES
        return cls(tuple(feedback), tuple(interactions), episodes, read_to, count)

    @property
    def closed(self) -> list[bytes]:
        """Digests of the closed episodes."""
        return [self.episodes[at : at + DIGEST_BYTES] for at in range(0, len(self.episodes), DIGEST_BYTES)]

    def merged(self, later: DecidedBlock) -> DecidedBlock:
        """Return one block with the items and episodes of this block and of ``later``."""
        feedback: dict[tuple[str, str, int, float], EndedFeedback] = {}
        for one in (*self.feedback, *later.feedback):
            key = one.status, one.reason, one.revision, one.time
            known = feedback.get(key)
            feedback[key] = (
                one if known is None else replace(known, ids=known.ids + one.ids, others=known.others + one.others)
            )
        interactions: dict[str, PackedIds] = {}
        for refused in (*self.interactions, *later.interactions):
            interactions[refused.reason] = interactions.get(refused.reason, PackedIds()) + refused.ids
        low, high = zip(self.read_to, later.read_to, strict=True)
        return DecidedBlock(
            tuple(feedback.values()),
            tuple(EndedInteractions(ids, reason) for reason, ids in interactions.items()),
            self.episodes + later.episodes,
            (max(low), max(high)),
            self.count + later.count,
        )


def block_of_decision(event: Decided) -> DecidedBlock:
    """Return the items and episodes of one ``Decided`` event as a block."""
    return DecidedBlock.of(event.feedback, event.interactions, event.episodes, event.read_to)


def block_of_admissions(admissions: Iterable[Admission], passed: Iterable[str]) -> DecidedBlock:
    """Return a block of the items that admissions decide in addition to the data that their draws train on.

    These are refused turns, closed episodes, and the admitted feedback ``passed``, which is below the low-water mark.
    """
    refused: dict[str, list[str]] = {}
    closed: dict[bytes, None] = {}
    read_to = [1, 1]
    for one in admissions:
        for name, reason in one.refused.items():
            refused.setdefault(reason, []).append(name)
        if one.origin and not one.interactions:
            closed[episode_digest(one.origin[0])] = None
        for place, seqs in enumerate((one.interactions, one.feedback)):
            read_to[place] = max([read_to[place], *(seq + 1 for seq in seqs.values())])
    ids = PackedIds.of(passed)
    return DecidedBlock.of(
        [EndedFeedback(ids, ADMITTED, "")] if len(ids) else [],
        [EndedInteractions(PackedIds.of(names), reason) for reason, names in refused.items()],
        b"".join(closed),
        (read_to[0], read_to[1]),
    )


def with_block(blocks: tuple[DecidedBlock, ...], new: DecidedBlock, low: tuple[int, int]) -> tuple[DecidedBlock, ...]:
    """Append the block ``new``, after merging it with earlier blocks of at most its size; drop the oldest blocks that
    are no longer needed.

    ``low``: low-water marks of INTERACTIONS and FEEDBACK.
    """
    if not new.count:
        return blocks
    found = list(blocks)
    while found and found[-1].count <= new.count and found[-1].count + new.count <= MAX_BLOCK:
        new = found.pop().merged(new)
    found.append(new)
    total = sum(block.count for block in found)
    while len(found) > 1:
        left = total - found[0].count
        is_below = all(read <= mark for read, mark in zip(found[0].read_to, low, strict=True))
        if not (left >= MAX_KEPT or (is_below and left >= MIN_KEPT)):
            break
        del found[0]
        total = left
    return tuple(found)


def reasons_of(ended: EndedFeedback) -> Iterator[tuple[str, str]]:
    """Yield ``(id, reason)`` for each item of feedback in ``ended``."""
    others = ended.others.unpack()
    if not others:
        yield from ((name, ended.reason) for name in ended.ids.unpack())
    else:
        yield from ((name, f"{ended.reason} {other}") for name, other in zip(ended.ids.unpack(), others, strict=True))


def _retractions(ended: EndedFeedback) -> Iterator[tuple[str, str]]:
    """Yield ``(item, id of its retraction)`` for each retracted item in ``ended``, and ``(retraction, '')`` for each
    retraction."""
    for name, reason in reasons_of(ended):
        kind, _, other = reason.partition(" ")
        yield name, other if kind == RETRACTED_BY else ""


def is_quarantine_rejection(one: EndedFeedback) -> bool:
    """Return True if the quarantine rejected the items of feedback that ``one`` lists. Clients may still revise such
    items."""
    return one.reason.startswith(QUARANTINE_PREFIX) and not one.revision


def final_ids(feedback: Iterable[EndedFeedback]) -> dict[str, str]:
    """Return id -> status of the items whose status can no longer change.

    Not included: rejections by the quarantine, which allow a later revision, and retractions that came before their
    item and still wait for it.
    """
    ends: dict[str, str] = {}
    late: list[str] = []
    for one in feedback:
        if one.revision:  # the status is of a late revision only; its item was decided before
            late += one.ids.unpack()
        elif one.status == "retracted":
            met = [(name, other) for name, other in _retractions(one) if other]
            ends |= {name: one.status for pair in met for name in pair}
        elif not is_quarantine_rejection(one):
            ends |= dict.fromkeys(one.ids.unpack(), one.status)
    return dict.fromkeys(late, ADMITTED) | ends
