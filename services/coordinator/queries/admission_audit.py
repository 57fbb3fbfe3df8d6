"""Audits admissions (decisions to train on live interactions): replays them from the stored interactions and feedback,
and checks them against the rules of the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.services.coordinator.online.admission import Decision, facts_of
from penstock.services.coordinator.online.episode import PostedEpisode, ServedEpisode
from penstock.services.coordinator.online.fairness import flaws_of_shares, owners_of
from penstock.services.coordinator.online.turns import (
    FeedbackItem,
    PostedTurn,
    Turn,
    canonical_id,
    episode_key,
    tokens_of,
)
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event
from penstock.shared.protocol.live.interaction import EPISODE_HEADER, MAX_TURNS, Feedback, FeedbackBatch, Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["StoredFacts", "audit_admissions", "flaws_of_admission", "replay_admissions", "replay_posted_admissions"]

MAX_AUDITED = 10_000
"""Number of newest admissions that an audit replays; more would take longer than users wait."""
AT_ONCE = 256
"""Approximate number of admissions whose records are in memory at once. All admissions of one decision stay
together."""
REWARD_TOLERANCE = 1e-6
"""Difference between a recorded reward and its replay that is tolerated. The tolerance is small, because a replay sums
the same numbers in the same order."""


async def audit_admissions(
    bus: Bus, job: str, config: OnlineJob, entries: Sequence[Sequence[Event]]
) -> tuple[int, list[str]]:
    """Replay the newest admissions; return ``(number replayed, differences)``. Raises Unavailable."""
    decisions = [event.admissions for entry in entries for event in entry if isinstance(event, Admitted)]
    turns = await _episode_seqs(bus, job)
    checked, flaws = 0, list[str]()
    for chunk in _chunks(decisions):
        stored = await _read_stored(bus, [admission for admissions in chunk for admission in admissions], turns)
        for admissions in chunk:
            count, found = await asyncio.to_thread(replay_admissions, admissions, stored, config)
            checked += count
            flaws += found
    return checked, flaws


def _chunks(decisions: Sequence[Sequence[Admission]]) -> Iterator[list[Sequence[Admission]]]:
    """Yield the newest decisions, newest first, in chunks of about AT_ONCE admissions."""
    chunk: list[Sequence[Admission]] = []
    left = MAX_AUDITED
    for admissions in reversed(decisions):
        if left <= 0:
            break
        chunk.append(admissions)
        left -= len(admissions)
        if sum(map(len, chunk)) >= AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _episode_seqs(bus: Bus, job: str) -> dict[str, list[int]]:
    """Return, by name of each episode, the stream sequence numbers of all records of its interactions."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for message in await bus.read(subjects.INTERACTIONS, subjects.interactions(job), headers_only=True):
        found[canonical_id(message.headers.get(EPISODE_HEADER, ""))].append(message.seq)
    return found


async def _read_stored(bus: Bus, admissions: Sequence[Admission], turns: dict[str, list[int]]) -> StoredFacts:
    own = {seq for admission in admissions for seq in admission.interactions.values()}
    records = await _records(bus, own)
    episodes = {canonical_id(record.episode) for record in records.values() if not record.alone}
    others = {seq for episode in episodes for seq in turns.get(episode, ())} - own
    records |= await _records(bus, others)
    feedback_seqs = {seq for admission in admissions for seq in admission.feedback.values()}
    items: dict[int, Sequence[Feedback]] = {}
    for seq, message in (await bus.get_whole(subjects.FEEDBACK, sorted(feedback_seqs))).items():
        with contextlib.suppress(ProtocolError):  # a deletion has overwritten it
            items[seq] = unpack(message.data, FeedbackBatch)[0].items
    oldest = min((seq for seqs in turns.values() for seq in seqs), default=1)
    return StoredFacts(records, items, turns, oldest)


async def _records(bus: Bus, seqs: set[int]) -> dict[int, Interaction]:
    found: dict[int, Interaction] = {}
    for seq, message in (await bus.get_whole(subjects.INTERACTIONS, sorted(seqs))).items():
        with contextlib.suppress(ProtocolError):  # a deletion has overwritten it
            found[seq] = unpack(message.data, Interaction)[0]
    return found


@dataclass
class StoredFacts:
    """Stored messages by stream sequence number: those of INTERACTIONS in ``records``, and those of FEEDBACK in
    ``items``.

    ``turns``: stream sequence numbers of all records of an episode, by its name. ``oldest``: lowest stream sequence
    number of a record of the job; earlier records may be gone.
    """

    records: Mapping[int, Interaction]
    items: Mapping[int, Sequence[Feedback]]
    turns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    oldest: int = 1


def replay_admissions(admissions: Sequence[Admission], stored: StoredFacts, job: OnlineJob) -> tuple[int, list[str]]:
    """Replay the admissions of one decision; return ``(number replayed, differences)``.

    Skips admissions with missing messages, and admissions without interactions that belong to no posted episode. An
    episode that differs from its replay is also skipped in two cases:

    - Records of older turns may be gone, and that could explain the difference: the replay would still wait, the
      episode has branches, or feedback names turns by number.
    - The episode has branches, and an earlier release decided on it, which did not support branches.
    """
    episodes: defaultdict[str, list[Admission]] = defaultdict(list)
    for admission in admissions:
        records = [stored.records.get(seq) for seq in admission.interactions.values()]
        if records and records[0] is not None:
            episodes[_stored_episode_key(records[0], job)].append(admission)
    checked, flaws = replay_posted_admissions(admissions, stored.items, job)
    for group in episodes.values():
        items = _items_of(group, stored)
        if items is None or any(seq not in stored.records for one in group for seq in one.interactions.values()):
            continue
        found = [_difference(group, turns, items, stored, job) for turns in _possible_turns(group, items, stored)]
        is_same, has_branches = "" in found, _has_branches(group, items, stored, job)
        in_doubt = None in found or has_branches or _names_turns_by_number(items)
        if not found or (in_doubt and not is_same and _may_lack(group, stored, job)):
            continue
        if has_branches and not is_same and not any(one.share for one in group):
            continue
        checked += len(group)
        if not is_same:
            flaws.append(found[0] or f"ordinal {group[0].ordinal}: decided again it would still wait")
    return checked, flaws


def _names_turns_by_number(items: Mapping[str, FeedbackItem]) -> bool:
    """Return True if feedback refers to a turn by its number."""
    return any(item.feedback.turn >= 0 and not item.feedback.inference for item in items.values())


def _may_lack(group: Sequence[Admission], stored: StoredFacts, job: OnlineJob) -> bool:
    """Return True if the episode may have had turns whose records were purged from INTERACTIONS."""
    first = stored.records[next(iter(group[0].interactions.values()))]
    return stored.oldest > 1 and not _is_single(first, job)


def _has_branches(
    group: Sequence[Admission], items: Mapping[str, FeedbackItem], stored: StoredFacts, job: OnlineJob
) -> bool:
    """Return True if some turn of the episode does not extend the turn before it."""
    trees = (_served_episode(seqs, items, stored, job).tree for seqs in _possible_turns(group, items, stored))
    return any(tree.parents != tuple(range(-1, len(tree.parents) - 1)) for tree in trees)


def _stored_episode_key(record: Interaction, job: OnlineJob) -> str:
    return canonical_id(record.id) if _is_single(record, job) else episode_key(record)


def _is_single(record: Interaction, job: OnlineJob) -> bool:
    """Return True if the leader decided on the interaction alone, not as a turn of an episode."""
    return record.alone or record.index > 0 or not job.online.has_credit


def _items_of(group: Sequence[Admission], stored: StoredFacts) -> dict[str, FeedbackItem] | None:
    """Return the items of feedback to which the admissions in ``group`` refer, by id; None if the stream no longer
    contains one of them."""
    found: dict[str, FeedbackItem] = {}
    for name, seq in ((name, seq) for one in group for name, seq in one.feedback.items()):
        revisions = [item for item in stored.items.get(seq, ()) if item.id == name]
        if not revisions:
            return None
        newest = max(revisions, key=lambda item: item.revision)
        found[name] = FeedbackItem(seq, msgspec.structs.replace(newest, seq=newest.seq or seq))
    return found


def _possible_turns(
    group: Sequence[Admission], items: Mapping[str, FeedbackItem], stored: StoredFacts
) -> Iterator[list[int]]:
    """Yield each list of turns that the leader may have had when it decided. A list contains the stream sequence
    numbers of the turns' records.

    The first list has all turns that had ended by then, the second only the admitted ones: the leader may not have read
    a record that was stored at that moment. Lists without a turn that feedback names are not yielded.
    """
    own = {name: seq for one in group for name, seq in one.interactions.items()}
    first = stored.records[next(iter(own.values()))]
    others = [
        seq
        for seq in stored.turns.get(canonical_id(first.episode), ())
        if (record := stored.records.get(seq)) is not None
        and episode_key(record) == episode_key(first)
        and canonical_id(record.id) not in own
        and not record.alone
        and record.index == 0
        and record.ended <= group[0].time
    ]
    others = sorted(others)[: MAX_TURNS - len(own)]
    named = {canonical_id(item.feedback.inference) for item in items.values() if item.feedback.inference}
    named -= {*own, episode_key(first)}
    if named <= {canonical_id(stored.records[seq].id) for seq in others}:
        yield [*own.values(), *others]
    if others and not named:
        yield list(own.values())


def _served_episode(
    seqs: Sequence[int], items: Mapping[str, FeedbackItem], stored: StoredFacts, job: OnlineJob
) -> ServedEpisode:
    """Rebuild a served episode from the turns ``seqs`` and the feedback ``items``, as the leader had it when it
    decided."""
    first = stored.records[seqs[0]]
    episode = ServedEpisode(_is_single(first, job))
    turns = {canonical_id(stored.records[seq].id): Turn(seq, stored.records[seq]) for seq in seqs}
    for turn in turns.values():
        episode.add(turn)
    for name, item in items.items():
        target = turns.get(canonical_id(item.feedback.inference))
        (target.items if target is not None else episode.items)[name] = item
    return episode


def _difference(
    group: Sequence[Admission],
    seqs: Sequence[int],
    items: Mapping[str, FeedbackItem],
    stored: StoredFacts,
    job: OnlineJob,
) -> str | None:
    """Return a description of the first difference between the admissions and their replay; '' if they agree, None if
    the replay would still wait for feedback."""
    episode = _served_episode(seqs, items, stored, job)
    admission = group[0]
    spans = [span for seq in admission.interactions.values() for span in stored.records[seq].spans]
    outcome = episode.settle(
        job, version=admission.lag + min(span.version for span in spans), now=admission.time
    )  # fmt: skip
    if outcome is None:
        return None
    found = {frozenset(canonical_id(turn.interaction.id) for turn in one.turns): one for one in outcome.trajectories}
    for one in group:
        replayed = found.get(frozenset(one.interactions))
        if replayed is None:
            return f"ordinal {one.ordinal}: decided again its turns would not be trained so"
        if not math.isclose(replayed.reward, one.reward, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE):
            return f"ordinal {one.ordinal}: decided again its reward would be {replayed.reward:g}, not {one.reward:g}"
        if (replayed.reason, replayed.objective) != (one.reason, one.objective):
            return f"ordinal {one.ordinal}: decided again it would be {replayed.objective} by {replayed.reason}"
        if one.share and not math.isclose(replayed.share, one.share, rel_tol=REWARD_TOLERANCE):
            return f"ordinal {one.ordinal}: decided again its share of the episode would be {replayed.share:g}"
    return ""


def replay_posted_admissions(
    admissions: Sequence[Admission], items: Mapping[int, Sequence[Feedback]], job: OnlineJob
) -> tuple[int, list[str]]:
    """Replay the admitted turns of posted episodes; return ``(number replayed, differences)``.

    One decision admits a posted episode, and names all of its items, untrained ones included. Trajectories, returns and
    weights follow from these items alone. An episode with a missing item is left out.
    """
    episodes: defaultdict[str, list[Admission]] = defaultdict(list)
    for admission in admissions:
        if admission.origin and not admission.interactions:
            episodes[admission.origin[0]].append(admission)
    checked, flaws = 0, list[str]()
    for group in episodes.values():
        episode = _posted_episode(group, items, job)
        if episode is not None:
            checked += len(group)
            flaws += _posted_differences(group, episode, job)
    return checked, flaws


def _posted_episode(
    group: Sequence[Admission], items: Mapping[int, Sequence[Feedback]], job: OnlineJob
) -> PostedEpisode | None:
    """Rebuild a posted episode as the leader had it when it decided; None if an item of its feedback is no longer
    stored."""
    turns = {}
    for name, seq in ((name, seq) for one in group for name, seq in one.feedback.items()):
        revisions = [item for item in items.get(seq, ()) if item.id == name]
        if not revisions:
            return None
        item = max(revisions, key=lambda item: item.revision)
        turns[name] = PostedTurn(FeedbackItem(seq, item), facts_of(item), tokens_of(item, job))
    return PostedEpisode(group[0].origin[0], turns)


def _posted_differences(group: Sequence[Admission], episode: PostedEpisode, job: OnlineJob) -> list[str]:
    names = [turn.name for turn in episode.ordered]
    taken = {
        names.index(name): Decision("train", one.reason, one.reward, one.objective)
        for one in group
        for name in one.origin[1:]
        if name in names
    }
    parts = {tuple(names[place] for place in found[0]): found for found in episode.trajectories(job, taken)}
    values = episode.credit(job).values
    flaws = []
    for one in group:
        part = parts.get(tuple(one.origin[1:]))
        if part is None:
            flaws.append(f"ordinal {one.ordinal}: decided again its turns would not be trained so")
            continue
        reward, share = values[part[0][-1]], part[1]
        if not math.isclose(one.reward, reward, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE):
            flaws.append(f"ordinal {one.ordinal}: decided again its reward would be {reward:g}, not {one.reward:g}")
        elif not math.isclose(one.share, share, rel_tol=REWARD_TOLERANCE):
            flaws.append(f"ordinal {one.ordinal}: decided again its share of the episode would be {share:g}")
    return flaws


def flaws_of_admission(
    entries: Sequence[Sequence[Event]], trained: Mapping[int, BatchSealed], job: OnlineJob
) -> tuple[int, list[str]]:
    """Check the admissions in a ledger; return ``(number of admissions, flaws)``.

    Each interaction is admitted at most once, and each item of feedback counts at most once. An admission for the
    policy loss is within the lag bound. A trained group has the reward and the objective of its admission. No owner
    exceeds its share of a batch.

    Args:
        trained: trained batches by number, without those that a rollback discarded.
    """
    max_lag, events = job.train.max_lag, [event for entry in entries for event in entry]
    admissions = [one for event in events if isinstance(event, Admitted) for one in event.admissions]
    flaws = [
        f"ordinal {one.ordinal}: admitted with lag {one.lag} > {max_lag}"
        for one in admissions
        if one.objective == "policy" and one.lag > max_lag
    ]
    flaws += [f"ordinal {one.ordinal}: no source" for one in admissions if not (one.interactions or one.feedback)]
    flaws += _admitted_twice("interaction", (name for one in admissions for name in one.interactions))
    flaws += _admitted_twice("feedback", (name for one in admissions for name in one.feedback))
    by_ordinal = {one.ordinal: one for one in admissions}
    return len(admissions), flaws + _unlike_admission(trained, by_ordinal) + _over_shares(trained, by_ordinal, job)


def _admitted_twice(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what} {name} was admitted {count} times" for name, count in Counter(names).items() if count > 1]


def _unlike_admission(trained: Mapping[int, BatchSealed], admissions: Mapping[int, Admission]) -> list[str]:
    flaws = []
    for number, batch in trained.items():
        for group in batch.groups:
            admission = admissions.get(group.draw.ordinal)
            if admission is None:
                flaws.append(f"batch {number}: draw {group.draw} was trained without an admission")
            elif group.objective != admission.objective:
                flaws.append(f"batch {number}: draw {group.draw} is {group.objective}, admitted {admission.objective}")
            elif any(abs(reward - admission.reward) > 1e-4 * max(1.0, abs(reward)) for reward in group.rewards):
                flaws.append(f"batch {number}: draw {group.draw} has reward {group.rewards}, not {admission.reward:g}")
    return flaws


def _over_shares(trained: Mapping[int, BatchSealed], admissions: Mapping[int, Admission], job: OnlineJob) -> list[str]:
    flaws = []
    for number, batch in trained.items():
        found = [admissions.get(group.draw.ordinal) for group in batch.groups]
        owners = [owners_of(admission) for admission in found if admission is not None]
        flaws += [f"batch {number}: {text}" for text in flaws_of_shares(job.online, owners)]
    return flaws
