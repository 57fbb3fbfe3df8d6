"""Decides once more on posted episodes that were admitted, from the items in the stream. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.services.coordinator.online.credit import Item
from penstock.services.coordinator.online.posted import facts_of
from penstock.services.coordinator.online.posted_episodes import PostedEpisode, PostedTurn, said_of
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.interaction import Feedback

__all__ = ["posted_again"]

CLOSE = 1e-6
"""Rewards are sums of the same numbers in the same order."""


def posted_again(
    admissions: Sequence[Admission], items: Mapping[int, Sequence[Feedback]], job: OnlineJob
) -> tuple[int, list[str]]:
    """``(how many were decided again, what came out otherwise)`` of turns of posted episodes.

    An episode is admitted in one decision, and names all of its items there, those included that nothing is learnt
    from: which turns make a trajectory, their returns and their weights follow from these alone. Left out is an episode
    of which an item is gone.
    """
    episodes: defaultdict[str, list[Admission]] = defaultdict(list)
    for admission in admissions:
        if admission.origin and not admission.interactions:
            episodes[admission.origin[0]].append(admission)
    checked, flaws = 0, list[str]()
    for group in episodes.values():
        episode = _episode_of(group, items, job)
        if episode is not None:
            checked += len(group)
            flaws += _differences(group, episode, job)
    return checked, flaws


def _episode_of(
    group: Sequence[Admission], items: Mapping[int, Sequence[Feedback]], job: OnlineJob
) -> PostedEpisode | None:
    """The episode as the leader had it that decided on these; None where not all of it is there."""
    turns = {}
    for name, seq in ((name, seq) for one in group for name, seq in one.feedback.items()):
        said = [item for item in items.get(seq, ()) if item.id == name]
        if not said:
            return None
        item = max(said, key=lambda item: item.revision)
        turns[name] = PostedTurn(Item(seq, item), facts_of(item), said_of(item, job))
    return PostedEpisode(turns)


def _differences(group: Sequence[Admission], episode: PostedEpisode, job: OnlineJob) -> list[str]:
    names = [turn.item.feedback.id for turn in episode.ordered]
    rules = {
        names.index(name): (one.objective, one.reason) for one in group for name in one.origin[1:] if name in names
    }
    parts = {tuple(names[place] for place in places): places for places in episode.parts(job, rules)}
    own = [places for places in parts.values() if rules[places[0]][0] == "policy"]
    values, shares = episode.credit(job).values, episode.shares(job, own)
    flaws = []
    for one in group:
        places = parts.get(tuple(one.origin[1:]))
        if places is None:
            flaws.append(f"ordinal {one.ordinal}: decided again its turns would not be trained so")
            continue
        reward, share = values[places[-1]], shares.get(places[0], 1.0)
        if not math.isclose(one.reward, reward, rel_tol=CLOSE, abs_tol=CLOSE):
            flaws.append(f"ordinal {one.ordinal}: decided again its reward would be {reward:g}, not {one.reward:g}")
        elif not math.isclose(one.share, share, rel_tol=CLOSE):
            flaws.append(f"ordinal {one.ordinal}: decided again its share of the episode would be {share:g}")
    return flaws
