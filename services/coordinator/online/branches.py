"""The tree of an episode: which turn goes on from which, and how much a part of it weighs. Pure.

==================================================  ======================================================
a turn whose prompt                                 goes on from
==================================================  ======================================================
begins with the prompt and the answer of earlier    the one of these that is longest: it ``extends`` that
turns, token by token
begins with the prompt of an earlier turn, but its  the newest turn of that conversation
answer was rendered anew
begins with neither                                 the turn before it; none, and it begins a branch of its
                                                    own, while another conversation of the episode goes on
==================================================  ======================================================
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.services.coordinator.online.beginnings import longest_earlier

__all__ = ["HEADER_TOKENS", "ROOT", "Said", "Tree", "shares_of", "tree_of"]

ROOT = -1
"""Where the parent of a turn stands that begins a branch."""
TOKEN_BYTES = array("i").itemsize
HEADER_TOKENS = 4
"""A template may put so many tokens between the header of an answer and its text, as of an empty thought, and leave
them out once the answer is part of the conversation."""


@dataclass(frozen=True, slots=True)
class Said:
    """The tokens of a turn: of its prompt, and of prompt and completion."""

    prompt: bytes
    whole: bytes

    @classmethod
    def of(cls, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Said:
        """Of token ids."""
        prompt = array("i", prompt_ids).tobytes()
        return cls(prompt, prompt + array("i", token_ids).tobytes())

    @property
    def nbytes(self) -> int:
        """Of both."""
        return len(self.prompt) + len(self.whole)


@dataclass(frozen=True, slots=True)
class Tree:
    """Turns by place in time. ``parents``: -1 of one that begins a branch; ``extends``: by all tokens of its parent."""

    parents: tuple[int, ...]
    extends: tuple[bool, ...]

    @property
    def children(self) -> list[list[int]]:
        """Turns that go on from each."""
        found: list[list[int]] = [[] for _ in self.parents]
        for place, parent in enumerate(self.parents):
            if parent != ROOT:
                found[parent].append(place)
        return found

    @property
    def roots(self) -> list[int]:
        """The first turn of the conversation that each is of."""
        found: list[int] = []
        for place, parent in enumerate(self.parents):
            found.append(place if parent == ROOT else found[parent])
        return found

    def below(self, place: int) -> list[int]:
        """A turn and all that follow from it."""
        found = {place}
        for later in range(place + 1, len(self.parents)):
            if self.parents[later] in found:
                found.add(later)
        return sorted(found)


def tree_of(turns: Sequence[Said]) -> Tree:
    """The tree of turns that are given in the order of their requests; the same whatever is known of them beside."""
    extended = _extended(turns)
    begun = _begun(turns, [place for place, whole in enumerate(extended) if place and whole == ROOT])
    parents: list[int] = []
    newest = list(range(len(turns)))  # of the conversation that begins with each
    for place, whole in enumerate(extended):
        parents.append(newest[begun[place]] if place in begun else whole)
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
    return Tree(tuple(parents), tuple(place != ROOT for place in extended))


def _extended(turns: Sequence[Said]) -> list[int]:
    """The newest of the earlier turns that are the longest beginning of each prompt."""
    wholes = [(one.whole, place) for place, one in enumerate(turns) if one.whole]
    found = longest_earlier(wholes, [(one.prompt, place) for place, one in enumerate(turns)])
    return [found[place][1] if place in found else ROOT for place in range(len(turns))]


def _begun(turns: Sequence[Said], asked: Sequence[int]) -> dict[int, int]:
    """The newest of the earlier turns whose prompts are the longest beginning of each of these, up to the answer.

    A prompt goes on from a shorter one that it begins with, but for the last tokens of that, which a template puts
    before an answer: those are at the end of both.
    """
    found: dict[int, tuple[int, int]] = {}
    for header in range(HEADER_TOKENS + 1):
        prompts: dict[bytes, list[tuple[bytes, int]]] = {}
        for place in asked:
            stem, tail = _cut(turns[place].prompt, header)
            prompts.setdefault(tail, []).append((stem[:-TOKEN_BYTES], place))
        stems: dict[bytes, list[tuple[bytes, int]]] = {tail: [] for tail in prompts}
        for place, one in enumerate(turns):
            stem, tail = _cut(one.prompt, header)
            if stem and tail in stems:
                stems[tail].append((stem, place))
        for tail, others in prompts.items():
            for place, (length, earlier) in longest_earlier(stems[tail], others).items():
                found[place] = max(found.get(place, (0, ROOT)), (length + len(tail), earlier))
    return {place: earlier for place, (_, earlier) in found.items()}


def _cut(prompt: bytes, header: int) -> tuple[bytes, bytes]:
    """``(what is before the header, the header)`` of so many tokens."""
    end = max(0, len(prompt) - header * TOKEN_BYTES)
    return prompt[:end], prompt[end:]


def shares_of(parents: Sequence[int], lengths: Sequence[int] | None = None) -> list[float]:
    """How much each part of an episode weighs, so that the episode is the mean of its branches.

    A part is in every branch that ends below it: of B branches it has the share of these, ``n / B``. With ``lengths``
    (tokens of each) a branch is the mean over its tokens instead of their sum: ``sum over its branches of (length of
    the part / length of the branch) / B``. ``parents`` are earlier parts, -1: none.
    """
    ends = sorted(set(range(len(parents))) - set(parents))
    found = [0.0] * len(parents)
    for end in ends:
        path = [end]
        while parents[path[-1]] != ROOT:
            path.append(parents[path[-1]])
        total = 0 if lengths is None else sum(lengths[part] for part in path)
        for part in path:
            found[part] += lengths[part] / total if lengths is not None and total else 1.0
    return [share / len(ends) for share in found]
