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
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
    extended, begun = _extended(turns), _begun(turns)
    parents: list[int] = []
    newest = list(range(len(turns)))  # of the conversation that begins with each
    for place, (whole, prompt) in enumerate(zip(extended, begun, strict=True)):
        parents.append(newest[prompt] if whole == ROOT != prompt else whole)
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
    """The newest of the earlier turns that are the longest beginning of each prompt; sorted, a text follows these."""
    entries = sorted((one.whole, 0, place) for place, one in enumerate(turns) if one.whole)
    entries += [(one.prompt, 1, place) for place, one in enumerate(turns)]
    found, stack = [ROOT] * len(turns), list[tuple[bytes, list[int]]]()
    for tokens, is_prompt, place in sorted(entries):
        while stack and not tokens.startswith(stack[-1][0]):
            stack.pop()
        if is_prompt:
            earlier = (places[bisect_left(places, place) - 1] for _, places in reversed(stack) if places[0] < place)
            found[place] = next(earlier, ROOT)
        elif stack and stack[-1][0] == tokens:
            stack[-1][1].append(place)
        else:
            stack.append((tokens, [place]))
    return found


def _begun(turns: Sequence[Said]) -> list[int]:
    """The newest of the earlier turns whose prompts are the longest beginning of each prompt, up to the answer."""
    entries = [(one.prompt[: -HEADER_TOKENS * TOKEN_BYTES], 0, one.prompt, place) for place, one in enumerate(turns)]
    entries += [(one.prompt, 1, one.prompt, place) for place, one in enumerate(turns)]
    found, stack = [ROOT] * len(turns), list[tuple[bytes, _Headers]]()
    for tokens, is_whole, prompt, place in sorted(entries):
        while stack and not tokens.startswith(stack[-1][0]):
            stack.pop()
        if is_whole:
            earlier = (headers.newest(prompt, place) for _, headers in reversed(stack))
            found[place] = next((one for one in earlier if one != ROOT), ROOT)
            continue
        if not (stack and stack[-1][0] == tokens):
            stack.append((tokens, _Headers(len(tokens))))
        stack[-1][1].add(prompt, place)
    return found


class _Headers:
    """Prompts that begin with the same ``start`` bytes and end at most ``HEADER_TOKENS`` after these.

    Another prompt goes on from one of them that is longer and begins with it, but for the last tokens of it, which a
    template puts before an answer: those are at the end of both.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._places: dict[tuple[bytes, bytes], list[int]] = {}
        """By what follows the common beginning, and what is only put before the answer."""

    def add(self, prompt: bytes, place: int) -> None:
        for end in range(len(prompt), max(self._start, TOKEN_BYTES) - 1, -TOKEN_BYTES):
            self._places.setdefault((prompt[self._start : end], prompt[end:]), []).append(place)

    def newest(self, prompt: bytes, place: int) -> int:
        """The newest turn before ``place`` from which this prompt goes on."""
        found = ROOT
        for tokens in range(HEADER_TOKENS + 1):
            middle = self._start + tokens * TOKEN_BYTES
            for header in range(HEADER_TOKENS - tokens + 1):
                end = len(prompt) - header * TOKEN_BYTES
                if end > middle:
                    places = self._places.get((prompt[self._start : middle], prompt[end:]), [])
                    found = max(found, places[bisect_left(places, place) - 1] if places and places[0] < place else ROOT)
        return found


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
