"""Similarity of two texts, from 0 to 1. Words are runs of letters and digits; case is ignored."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["bleu", "common_length", "fuzzy_match", "gleu", "rouge_l", "rouge_n", "similarity"]

MAX_ORDER = 4
MAX_ITEMS = 1 << 15
"""Maximum length n of the shorter sequence in ``common_length``, whose bit masks take up to n^2 / 16 bytes."""
_WORD = re.compile(r"\w+")


def similarity(metric: str, text: str, reference: str) -> float:
    """Return the similarity of two texts by ``metric``, which is named as in a ``text_similarity`` grader.

    Raises:
        ValueError: the texts are too long.
    """
    if metric == "fuzzy_match":
        return fuzzy_match(text, reference)
    words, wanted = _words(text), _words(reference)
    if metric in ("bleu", "gleu"):
        return (bleu if metric == "bleu" else gleu)(words, wanted)
    order = metric.removeprefix("rouge_")
    return rouge_l(words, wanted) if order == "l" else rouge_n(words, wanted, int(order))


def fuzzy_match(text: str, reference: str) -> float:
    """Return 1 - (insertions and deletions) / (characters of both texts)."""
    size = len(text) + len(reference)
    return 2 * common_length(text, reference) / size if size else 1.0


def rouge_n(words: Sequence[str], wanted: Sequence[str], order: int) -> float:
    """Return ROUGE-N: the F1 of the common n-grams of ``order`` words (Lin 2004)."""
    ours, theirs = _runs(words, order), _runs(wanted, order)
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Return ROUGE-L: the F1 of the longest common subsequence of words (Lin 2004)."""
    return _f1(common_length(words, wanted), len(words), len(wanted))


def bleu(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Return sentence BLEU of orders 1 to 4 (Papineni et al. 2002).

    From order 2 on, one is added to both counts (Lin and Och 2004); otherwise a single missing order would make it 0.
    """
    if not words or not wanted:
        return float(words == wanted)
    logs = 0.0
    for order in range(1, MAX_ORDER + 1):
        ours, added = _runs(words, order), int(order > 1)
        hits = (ours & _runs(wanted, order)).total() + added
        if not hits:
            return 0.0
        logs += math.log(hits / (ours.total() + added))
    brevity = min(0.0, 1 - len(wanted) / len(words))
    return math.exp(brevity + logs / MAX_ORDER)


def gleu(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Return GLEU: the lower of precision and recall of n-grams of 1 to 4 words (Wu et al. 2016, arXiv 1609.08144, §
    5.2)."""
    orders = range(1, MAX_ORDER + 1)
    ours, theirs = ([_runs(some, order) for order in orders] for some in (words, wanted))
    hits = sum((one & other).total() for one, other in zip(ours, theirs, strict=True))
    most = max(sum(runs.total() for runs in ours), sum(runs.total() for runs in theirs))
    return hits / most if most else 1.0


def common_length(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence, bit-parallel (Hyyro 2004): one big integer per step.

    Raises:
        ValueError: both sequences have more than ``MAX_ITEMS`` items.
    """
    one, other = sorted((one, other), key=len)
    if len(one) > MAX_ITEMS:
        raise ValueError(
            f"both texts are too long to find what they have in common ({len(one)} and {len(other)} characters or "
            f"words): one of them may have at most {MAX_ITEMS}"
        )
    places: dict[Hashable, int] = {}
    for place, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full
    for item in other:
        matches = row & places.get(item, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(one) - row.bit_count()


def _f1(hits: int, ours: int, theirs: int) -> float:
    if not ours and not theirs:
        return 1.0
    return 2 * hits / (ours + theirs)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
