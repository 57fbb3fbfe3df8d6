"""Decides once more on what was admitted, from what is stored: no reward is believed that does not follow. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.services.coordinator.online.credit import Item, Turn
from penstock.services.coordinator.online.episode import Episode
from penstock.services.coordinator.online.names import canonical, episode_of
from penstock.services.coordinator.online.posted_again import posted_again
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import MAX_TURNS, Feedback, Interaction

__all__ = ["Stored", "decided_again"]

CLOSE = 1e-6
"""Rewards are sums of the same numbers in the same order."""


@dataclass
class Stored:
    """What the streams hold, by sequence.

    ``turns``: sequences of all records of an episode, by its name. ``oldest``: lowest sequence of a record of the job;
    what was before it may be gone.
    """

    records: Mapping[int, Interaction]
    items: Mapping[int, Sequence[Feedback]]
    turns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    oldest: int = 1


def decided_again(admissions: Sequence[Admission], stored: Stored, job: OnlineJob) -> tuple[int, list[str]]:
    """``(how many were decided again, what came out otherwise)`` of the admissions of one decision.

    Left out is what has no interactions of its own and is of no posted episode, what is not all there any more, what
    comes out otherwise in a way that a turn before the oldest record would explain (by when its episode began, by the
    numbers of its turns, or by its branches), and episodes with branches that an earlier build decided, for which they
    had none.
    """
    episodes: defaultdict[str, list[Admission]] = defaultdict(list)
    for admission in admissions:
        records = [stored.records.get(seq) for seq in admission.interactions.values()]
        if records and records[0] is not None:
            episodes[_key(records[0], job)].append(admission)
    checked, flaws = posted_again(admissions, stored.items, job)
    for group in episodes.values():
        items = _items_of(group, stored)
        if items is None or any(seq not in stored.records for one in group for seq in one.interactions.values()):
            continue
        found = [_difference(group, turns, items, stored, job) for turns in _turns(group, items, stored)]
        is_same, has_branches = "" in found, _has_branches(group, items, stored, job)
        in_doubt = None in found or has_branches or _is_numbered(items)
        if not found or (in_doubt and not is_same and _may_lack(group, stored, job)):
            continue
        if has_branches and not is_same and not any(one.share for one in group):
            continue
        checked += len(group)
        if not is_same:
            flaws.append(found[0] or f"ordinal {group[0].ordinal}: decided again it would still wait")
    return checked, flaws


def _is_numbered(items: Mapping[str, Item]) -> bool:
    """Whether something was said of a turn by its number."""
    return any(item.feedback.turn >= 0 and not item.feedback.inference for item in items.values())


def _may_lack(group: Sequence[Admission], stored: Stored, job: OnlineJob) -> bool:
    """Whether its episode may have had turns of which nothing is left."""
    first = stored.records[next(iter(group[0].interactions.values()))]
    return stored.oldest > 1 and not _is_single(first, job)


def _has_branches(group: Sequence[Admission], items: Mapping[str, Item], stored: Stored, job: OnlineJob) -> bool:
    """Whether some turn of its episode does not go on from the one before it."""
    trees = (_episode_of(seqs, items, stored, job).tree for seqs in _turns(group, items, stored))
    return any(tree.parents != tuple(range(-1, len(tree.parents) - 1)) for tree in trees)


def _key(record: Interaction, job: OnlineJob) -> str:
    return canonical(record.id) if _is_single(record, job) else episode_of(record)


def _is_single(record: Interaction, job: OnlineJob) -> bool:
    """Whether it was decided by itself."""
    return record.alone or record.index > 0 or not job.online.has_credit


def _items_of(group: Sequence[Admission], stored: Stored) -> dict[str, Item] | None:
    """What was said, by id; None where not all of it is there."""
    found: dict[str, Item] = {}
    for name, seq in ((name, seq) for one in group for name, seq in one.feedback.items()):
        said = [item for item in stored.items.get(seq, ()) if item.id == name]
        if not said:
            return None
        newest = max(said, key=lambda item: item.revision)
        found[name] = Item(seq, msgspec.structs.replace(newest, seq=newest.seq or seq))
    return found


def _turns(group: Sequence[Admission], items: Mapping[str, Item], stored: Stored) -> Iterator[list[int]]:
    """Sequences of the turns that the decision may have seen: all of the episode by then, or only the admitted ones.

    A record that was written in the moment of the decision may have been read before or after it. The decision has seen
    every turn that an item names: nothing comes where one of these is gone.
    """
    own = {name: seq for one in group for name, seq in one.interactions.items()}
    first = stored.records[next(iter(own.values()))]
    others = [
        seq
        for seq in stored.turns.get(canonical(first.episode), ())
        if (record := stored.records.get(seq)) is not None
        and episode_of(record) == episode_of(first)
        and canonical(record.id) not in own
        and not record.alone
        and record.index == 0
        and record.ended <= group[0].time
    ]
    others = sorted(others)[: MAX_TURNS - len(own)]
    named = {canonical(item.feedback.inference) for item in items.values() if item.feedback.inference}
    named -= {*own, episode_of(first)}
    if named <= {canonical(stored.records[seq].id) for seq in others}:
        yield [*own.values(), *others]
    if others and not named:
        yield list(own.values())


def _episode_of(seqs: Sequence[int], items: Mapping[str, Item], stored: Stored, job: OnlineJob) -> Episode:
    """The episode as the leader had it that decided on these."""
    first = stored.records[seqs[0]]
    episode = Episode(_is_single(first, job))
    turns = {canonical(stored.records[seq].id): Turn(seq, stored.records[seq]) for seq in seqs}
    for turn in turns.values():
        episode.add(turn)
    for name, item in items.items():
        target = turns.get(canonical(item.feedback.inference))
        (target.items if target is not None else episode.items)[name] = item
    return episode


def _difference(
    group: Sequence[Admission], seqs: Sequence[int], items: Mapping[str, Item], stored: Stored, job: OnlineJob
) -> str | None:
    """What an admission says otherwise than its records and feedback; '' for nothing, None: it would still wait."""
    episode = _episode_of(seqs, items, stored, job)
    admission = group[0]
    spans = [span for seq in admission.interactions.values() for span in stored.records[seq].spans]
    outcome = episode.settle(
        job, version=admission.lag + min(span.version for span in spans), now=admission.time
    )  # fmt: skip
    if outcome is None:
        return None
    found = {frozenset(canonical(turn.interaction.id) for turn in one.turns): one for one in outcome.trajectories}
    for one in group:
        again = found.get(frozenset(one.interactions))
        if again is None:
            return f"ordinal {one.ordinal}: decided again its turns would not be trained so"
        if not math.isclose(again.reward, one.reward, rel_tol=CLOSE, abs_tol=CLOSE):
            return f"ordinal {one.ordinal}: decided again its reward would be {again.reward:g}, not {one.reward:g}"
        if (again.reason, again.objective) != (one.reason, one.objective):
            return f"ordinal {one.ordinal}: decided again it would be {again.objective} by {again.reason}"
        if one.share and not math.isclose(again.share, one.share, rel_tol=CLOSE):
            return f"ordinal {one.ordinal}: decided again its share of the episode would be {again.share:g}"
    return ""
