"""With which of many texts, and of those alone that were there before it, a text begins. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["longest_earlier"]


def longest_earlier(
    texts: Iterable[tuple[bytes, int]], asked: Iterable[tuple[bytes, int]]
) -> dict[int, tuple[int, int]]:
    """The longest text that each of ``asked`` begins with and that has a lower place; none: it is left out.

    Sorted, a text follows those that it begins with: these are a path, on which the nearest one with a lower place is
    found in ``O(log n)`` steps, in whatever order the places are.

    Args:
        texts: not empty, each with its place, from 0.
        asked: texts with places of their own.

    Returns:
        By place ``(bytes of the text, its newest place below that one)``.
    """
    entries = [(data, False, place) for data, place in texts] + [(data, True, place) for data, place in asked]
    found: dict[int, tuple[int, int]] = {}
    path: list[_Text] = [_Text()]
    for data, is_asked, place in sorted(entries):
        while not data.startswith(path[-1].data):
            path.pop()
        if not is_asked and path[-1].data == data:
            path[-1].places.append(place)
        elif not is_asked:
            path.append(_Text(data, place, path[-1].before(place)))
        elif (text := path[-1].before(place)).data:
            before = bisect_left(text.places, place) - 1
            found[place] = len(text.data), text.places[before]
    return found


class _Text:
    """A text and its places, lowest first; the empty one, with which all begin, is before all.

    Attributes:
        earlier: the longest text that it begins with and that is earlier: a chain down to the empty one.
        far: further down that chain, as far as its depth allows for jumps that double (Myers 1983, "An applicative
            random-access stack").
    """

    __slots__ = ("data", "depth", "earlier", "far", "places")

    def __init__(self, data: bytes = b"", place: int = -1, earlier: _Text | None = None) -> None:
        self.data, self.places = data, [place]
        self.earlier: _Text = earlier or self
        self.far: _Text = self.earlier
        self.depth: int = 0 if earlier is None else earlier.depth + 1
        if earlier is not None and earlier.depth - earlier.far.depth == earlier.far.depth - earlier.far.far.depth:
            self.far = earlier.far.far

    def before(self, place: int) -> _Text:
        """Itself or the longest text below it whose lowest place is lower than ``place``."""
        text = self
        while text.places[0] >= place:
            text = text.far if text.far.places[0] >= place else text.earlier
        return text
