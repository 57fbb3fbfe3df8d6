"""Assigns credit: builds the tree of an episode's turns, computes returns along it, and forms weighted trajectories.
Pure.

The parent of a turn follows from its prompt:

==================================================  ======================================================
the prompt begins with                              parent
==================================================  ======================================================
prompt and answer of earlier turns, token by token  the longest of these: the turn ``extends`` it
the prompt of an earlier turn, whose answer was     the newest turn of that conversation
rendered anew
neither                                             the turn before it; but none if a later turn continues
                                                    an earlier conversation: then it begins a branch
==================================================  ======================================================
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.services.coordinator.online.fairness import Owners, within_bounds
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.objective import Objective

__all__ = [
    "HEADER_TOKENS",
    "ROOT",
    "TurnKind",
    "TurnTokens",
    "TurnTree",
    "branch_ends",
    "branch_shares",
    "form_trajectories",
    "longest_earlier_prefix",
    "returns",
    "turn_tree",
]

ROOT = -1
"""Parent of a turn that begins a branch."""
TOKEN_BYTES = array("i").itemsize
HEADER_TOKENS = 4
"""Maximum number of tokens (an empty thought, for example) that a chat template may put between the header and the text
of a new answer, and leave out once the answer is part of the conversation."""


def longest_earlier_prefix(
    texts: Iterable[tuple[bytes, int]], asked: Iterable[tuple[bytes, int]]
) -> dict[int, tuple[int, int]]:
    """For each text in ``asked``, find the longest of ``texts`` that is a prefix of it and has a lower position.

    In sorted order a text follows all of its prefixes, which form a path. Finding the nearest prefix with a lower
    position on this path takes ``O(log n)`` steps, whatever the order of positions is.

    Args:
        texts: ``(text, position from 0)``; no text is empty.
        asked: ``(text, position)`` of the texts whose prefixes are wanted.

    Returns:
        ``(length of the prefix in bytes, its highest position below that of the text)``, by the position of the text
        in ``asked``; texts without a prefix are left out.
    """
    entries = [(data, False, place) for data, place in texts] + [(data, True, place) for data, place in asked]
    found: dict[int, tuple[int, int]] = {}
    path: list[_PrefixNode] = [_PrefixNode()]
    for data, is_asked, place in sorted(entries):
        while not data.startswith(path[-1].data):
            path.pop()
        if not is_asked and path[-1].data == data:
            path[-1].places.append(place)
        elif not is_asked:
            path.append(_PrefixNode(data, place, path[-1].before(place)))
        elif (text := path[-1].before(place)).data:
            before = bisect_left(text.places, place) - 1
            found[place] = len(text.data), text.places[before]
    return found


class _PrefixNode:
    """Node in a tree of prefixes: a prefix, and the positions of the turns with exactly this text (``places``), lowest
    first.

    The root is the empty prefix.

    Attributes:
        earlier: node of the longest prefix with a lower position. These links form a chain down to the root.
        far: a node further down that chain, as far as jumps that double with depth allow (Myers 1983, "An applicative
            random-access stack").
    """

    __slots__ = ("data", "depth", "earlier", "far", "places")

    def __init__(self, data: bytes = b"", place: int = -1, earlier: _PrefixNode | None = None) -> None:
        self.data, self.places = data, [place]
        self.earlier: _PrefixNode = earlier or self
        self.far: _PrefixNode = self.earlier
        self.depth: int = 0 if earlier is None else earlier.depth + 1
        if earlier is not None and earlier.depth - earlier.far.depth == earlier.far.depth - earlier.far.far.depth:
            self.far = earlier.far.far

    def before(self, place: int) -> _PrefixNode:
        """Of this node and the nodes of its prefixes, return the longest one that has a turn at a position below
        ``place``; return the root if none has."""
        text = self
        while text.places[0] >= place:
            text = text.far if text.far.places[0] >= place else text.earlier
        return text


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Token ids of a turn as bytes: ``prompt``, and ``full`` with the prompt and the completion."""

    prompt: bytes
    full: bytes

    @classmethod
    def of(cls, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> TurnTokens:
        """Pack the token ids of a turn's prompt and of its completion."""
        prompt = array("i", prompt_ids).tobytes()
        return cls(prompt, prompt + array("i", token_ids).tobytes())

    @property
    def nbytes(self) -> int:
        """Total size of ``prompt`` and ``full`` in bytes."""
        return len(self.prompt) + len(self.full)


@dataclass(frozen=True, slots=True)
class TurnTree:
    """Parent of each turn, by position in time (``ROOT`` for the first turn of a branch).

    ``extends`` is True where a turn's prompt begins with all tokens of its parent.
    """

    parents: tuple[int, ...]
    extends: tuple[bool, ...]

    @property
    def children(self) -> list[list[int]]:
        """For each turn, the positions of its children."""
        found: list[list[int]] = [[] for _ in self.parents]
        for place, parent in enumerate(self.parents):
            if parent != ROOT:
                found[parent].append(place)
        return found

    @property
    def roots(self) -> list[int]:
        """For each turn, the position of the first turn of its conversation."""
        found: list[int] = []
        for place, parent in enumerate(self.parents):
            found.append(place if parent == ROOT else found[parent])
        return found

    def rated(self, has_feedback: Sequence[bool], *, whole: bool) -> list[bool]:
        """Return one flag per turn: True if its conversation has feedback, or if ``whole`` says that the whole episode
        has."""
        roots = self.roots
        rated = {root for root, one in zip(roots, has_feedback, strict=True) if one}
        return [whole or root in rated for root in roots]

    def below(self, place: int) -> list[int]:
        """Return ``place``, the position of a turn, and the positions of all its descendants."""
        found = {place}
        for later in range(place + 1, len(self.parents)):
            if self.parents[later] in found:
                found.add(later)
        return sorted(found)


def turn_tree(turns: Sequence[TurnTokens]) -> TurnTree:
    """Build the tree of ``turns``, which are in the order of their requests. The result depends on nothing else."""
    extends_turn = _extended_turns(turns)
    continued = _continued_prompts(turns, [place for place, full in enumerate(extends_turn) if place and full == ROOT])
    parents: list[int] = []
    newest = list(range(len(turns)))  # newest turn of the conversation that each turn begins
    for place, full in enumerate(extends_turn):
        parents.append(newest[continued[place]] if place in continued else full)
        above = parents[-1]
        while above != ROOT:
            newest[above] = place
            above = parents[above]
    open_until, links = ROOT, [ROOT] * len(turns)
    for place, parent in enumerate(parents):
        if parent != ROOT:
            links[parent] = place
    for place in range(1, len(turns)):
        open_until = max(open_until, links[place - 1])
        if parents[place] == ROOT and open_until <= place:
            parents[place] = place - 1
    return TurnTree(tuple(parents), tuple(place != ROOT for place in extends_turn))


def _extended_turns(turns: Sequence[TurnTokens]) -> list[int]:
    """For each turn T, return the position of the earlier turn whose prompt and answer together are the longest prefix
    of T's prompt; ``ROOT`` if there is none."""
    wholes = [(one.full, place) for place, one in enumerate(turns) if one.full]
    found = longest_earlier_prefix(wholes, [(one.prompt, place) for place, one in enumerate(turns)])
    return [found[place][1] if place in found else ROOT for place in range(len(turns))]


def _continued_prompts(turns: Sequence[TurnTokens], asked: Sequence[int]) -> dict[int, int]:
    """For each turn in ``asked``, find the earlier turn whose conversation it continues; leave out turns that continue
    none.

    The prompt of this earlier turn is a prefix of the asked turn's prompt: the longest one, and of equal ones the
    newest. Both prompts must end with the same header, which a template puts before an answer; the prefix excludes it.
    """
    found: dict[int, tuple[int, int]] = {}
    for header in range(HEADER_TOKENS + 1):
        prompts: dict[bytes, list[tuple[bytes, int]]] = {}
        for place in asked:
            stem, tail = _split_header(turns[place].prompt, header)
            prompts.setdefault(tail, []).append((stem[:-TOKEN_BYTES], place))
        stems: dict[bytes, list[tuple[bytes, int]]] = {tail: [] for tail in prompts}
        for place, one in enumerate(turns):
            stem, tail = _split_header(one.prompt, header)
            if stem and tail in stems:
                stems[tail].append((stem, place))
        for tail, others in prompts.items():
            for place, (length, earlier) in longest_earlier_prefix(stems[tail], others).items():
                found[place] = max(found.get(place, (0, ROOT)), (length + len(tail), earlier))
    return {place: earlier for place, (_, earlier) in found.items()}


def _split_header(prompt: bytes, header: int) -> tuple[bytes, bytes]:
    """Split a prompt before its last ``header`` tokens; return both parts. These last tokens are the header, which a
    chat template puts before an answer."""
    end = max(0, len(prompt) - header * TOKEN_BYTES)
    return prompt[:end], prompt[end:]


def branch_ends(parents: Sequence[int]) -> set[int]:
    """Return the position of the last turn of each branch, which is the parent of no other turn."""
    return set(range(len(parents))) - set(parents)


def branch_shares(parents: Sequence[int], lengths: Sequence[int] | None = None) -> list[float]:
    """Return a weight, the share, for each part of an episode. The parts form a tree; a branch is a path from its root
    to a leaf. If the value of each part is multiplied by its share, the sum over all parts is the average branch total,
    where the total of a branch is the sum of the values of its parts.

    A part belongs to every branch that ends below it: with B branches, n of them below, its share is ``n / B``. With
    ``lengths`` (tokens of each part) a branch is the mean over its tokens instead of their sum: the share is ``sum over
    its branches of (length of the part / length of the branch) / B``. ``parents`` are earlier parts or ``ROOT``.
    """
    ends = sorted(branch_ends(parents))
    found = [0.0] * len(parents)
    for end in ends:
        path = [end]
        while parents[path[-1]] != ROOT:
            path.append(parents[path[-1]])
        total = 0 if lengths is None else sum(lengths[part] for part in path)
        for part in path:
            found[part] += lengths[part] / total if lengths is not None and total else 1.0
    return [share / len(ends) for share in found]


def returns(
    rewards: Sequence[float], gamma: float, tree: TurnTree | None = None, counts: Sequence[bool] = ()
) -> list[float]:
    """Compute the return of each turn: its own reward plus ``gamma`` times the mean return of its children.

    In a chain, where each turn has one child, this is the discounted sum of the rewards from the turn on.

    Args:
        tree: parents of turns; None is a chain.
        counts: True for a turn that is trained or has feedback. The mean leaves out a child if neither the child nor
            any of its descendants counts, unless this is so for all children.
    """
    found, matters = list(rewards), [*counts] or [True] * len(rewards)
    children = tree.children if tree is not None else [[place] for place in range(1, len(rewards))] + [[]]
    for place in range(len(found) - 1, -1, -1):
        after = children[place]
        matters[place] = matters[place] or any(matters[child] for child in after)
        after = [child for child in after if matters[child]] or after
        if after:
            found[place] = rewards[place] + gamma * (sum(found[child] for child in after) / len(after))
    return found


def nearest_ancestor(tree: TurnTree, place: int, among: Container[int]) -> tuple[int, bool]:
    """Return a turn's nearest ancestor in ``among``, and True if the turn's prompt begins with all tokens of this
    ancestor. Return ``(ROOT, False)`` if ``among`` contains no ancestor."""
    extends = tree.extends[place]
    above = tree.parents[place]
    while above != ROOT and above not in among:
        extends = extends and tree.extends[above]
        above = tree.parents[above]
    return above, extends and above != ROOT


def trajectory_weights(
    job: OnlineJob, tree: TurnTree, parts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> dict[int, float]:
    """Return the weight of each trajectory in the policy loss, by the position of its first turn in the episode.

    The result is {} if all weights are 1.

    ``parts`` has the turns of each trajectory, ``lengths`` the number of sampled tokens of each turn of the episode.
    """
    if job.online.balance == "trajectories":
        return {}
    part_of = {place: part for part, places in enumerate(parts) for place in places}
    above = (nearest_ancestor(tree, places[0], part_of)[0] for places in parts)
    parents = [part_of.get(place, ROOT) for place in above]
    sizes = [sum(lengths[place] for place in places) for places in parts]
    by_length = sizes if job.algorithm.aggregation == "sequence_mean" else None
    return dict(zip((places[0] for places in parts), branch_shares(parents, by_length), strict=True))


def join_turns(
    tree: TurnTree, kinds: Mapping[int, Hashable], values: Sequence[float], temperatures: Sequence[float]
) -> list[list[int]]:
    """Join trained turns into trajectories; return the positions of each trajectory's turns, ordered by first turn.

    ``kinds`` maps the position of each trained turn to its kind, ``values`` are the returns of all turns.

    A turn joins its nearest trained ancestor if its prompt begins with the ancestor's prompt and completion, token by
    token, if no other turn has this nearest trained ancestor, and if both have the same kind, return and temperature.
    Then one pass over the tokens serves both, and one reward describes both.
    """
    before = {place: nearest_ancestor(tree, place, kinds) for place in kinds}
    following = Counter(above for above, _ in before.values())
    found: dict[int, list[int]] = {}
    for place in sorted(kinds):
        above, extends = before[place]
        same = extends and following[above] == 1 and kinds[above] == kinds[place]
        if same and math.isclose(values[above], values[place]) and temperatures[above] == temperatures[place]:
            found[place] = found[above]
            found[place].append(place)
        else:
            found[place] = [place]
    return [places for place, places in found.items() if places[0] == place]


class TurnKind(NamedTuple):
    """Properties of a trained turn (such as its loss) that all turns of one trajectory must have in common."""

    objective: Objective
    is_weighted: bool
    """True if the turn's tokens enter the policy loss, so that its trajectory gets a share of the episode's weight."""
    group: Hashable = None
    """Any other value that all turns of one trajectory must have in common."""


def form_trajectories(
    job: OnlineJob,
    tree: TurnTree,
    kinds: Mapping[int, TurnKind],
    *,
    values: Sequence[float],
    turns: Sequence[tuple[float, int]],
    owners: Callable[[Sequence[int]], Owners] | None = None,
) -> list[tuple[list[int], float]]:
    """Form the trajectories of an episode; return ``(positions of the turns, weight)`` of each.

    Args:
        kinds: kinds of the turns that can be trained on, by position.
        values: returns of all turns.
        turns: temperature and number of sampled tokens of each turn.
        owners: returns the owners of a trajectory; their shares limit the trajectories. None: no limit.
    """
    temperatures = [temperature for temperature, _ in turns]

    def join(places: Collection[int]) -> list[list[int]]:
        return join_turns(tree, {place: kinds[place] for place in places}, values, temperatures)

    if owners is None:
        parts = join(kinds)
    else:
        parts = within_bounds(job, kinds, join, lambda places: (owners(places), kinds[places[0]].objective))
    own = [places for places in parts if kinds[places[0]].is_weighted]
    weights = trajectory_weights(job, tree, own, [num_tokens for _, num_tokens in turns])
    return [(places, weights.get(places[0], 1.0)) for places in parts]
