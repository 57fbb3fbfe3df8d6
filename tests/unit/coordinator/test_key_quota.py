"""Limits on the memory and stream space of undecided examples, in all and for each API key."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.online import examples as examples_module
from penstock.services.coordinator.online.credit import turn_tree
from penstock.services.coordinator.online.examples import KeyQuota
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.turns import tokens_of
from penstock.shared.protocol.live.interaction import Feedback

spec = importlib.util.spec_from_file_location("posted", Path(__file__).with_name("test_posted_episodes.py"))
assert spec is not None
assert spec.loader is not None
posted: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(posted)
job, turn, NOW = posted.job, posted.turn, posted.NOW
LONGEST = 16 + 4
"""Tokens of the longest prompt and answer together."""


def held(matching: Matching) -> int:
    """Return the bytes of tokens that ``matching`` holds for turns of posted episodes."""
    episodes = matching.examples._episodes.values()
    return sum(one.tokens.nbytes for episode in episodes for one in episode.turns.values())


def test_tokens_of_an_untrusted_key_are_not_held() -> None:
    one = turn(0, [1] * 10, [2, 3])
    assert tokens_of(one, job(posted={}, off_policy=None)).nbytes == 0
    assert tokens_of(one, job(off_policy=None)).nbytes == 4 * (10 + 12)
    assert tokens_of(one, job(posted={})).nbytes == 4 * (10 + 12), "it may be imitated"


@pytest.mark.parametrize("size", [LONGEST + 1, 100_000])
def test_a_turn_that_is_too_long_is_held_truncated(size: int) -> None:
    for one in (turn(0, [1] * size, [2]), turn(0, [1], [2] * size), turn(0, [1] * size, [2] * size)):
        matching = Matching(job())
        matching.on_feedback(1, one, NOW)
        assert 0 < held(matching) <= 2 * 4 * LONGEST


def test_turns_that_are_too_long_stay_in_their_conversation() -> None:
    """Turns that are too long to train keep their parents, so rewards are credited within their own conversation."""
    first, other = list(range(1, 15)), list(range(101, 115))
    turns = [
        turn(0, first, [20]),
        turn(1, other, [120]),
        turn(2, [*first, 20, *range(30, 60)], [21]),
        turn(3, [*other, 120, *range(130, 160)], [121]),
        turn(4, [*first, 20, *range(30, 60), 21, *range(60, 90)], [22]),
    ]
    assert turn_tree([tokens_of(one, job()) for one in turns]).parents == (-1, -1, 0, 1, 2)


def test_a_key_above_its_share_of_the_stream_loses_its_oldest_items(monkeypatch: pytest.MonkeyPatch) -> None:
    found = KeyQuota()
    found.max_bytes = 8000
    for name in "abcd":
        found.add("k", name, 300)
    assert found.excess("k") == ["a"]
    for name in "ab":
        found.remove(name)
    assert (found.excess("k"), found.nbytes) == ([], 600)
    found.add("k", "c", 100)
    assert found.nbytes == 400, "it is revised"
    found.add("k", "huge", 9000)
    assert found.excess("k") == ["d", "c"], "not the newest one, or no item of that size could be accepted"
    monkeypatch.setattr(examples_module, "MAX_PER_KEY", 2)
    small = KeyQuota()
    for name in "abcd":
        small.add("k", name, 1)
    assert small.excess("k") == ["a", "b"]
    assert small.excess("another") == []
    small.move("a")
    assert small.excess("k") == ["b", "c"], "a deletion copied it behind the others"


def test_all_keys_together_have_half_of_the_stream() -> None:
    found = KeyQuota()
    found.max_bytes = 8000
    for key in "klmn":
        for number in range(10):
            found.add(key, f"{key}{number}", 100)
    assert found.excess("n") == []
    found.add("m", "m10", 0)
    found.add("o", "o0", 150)
    assert found.excess("o") == ["k0", "k1"], "from the key with the most, not from the last one"
    for name in ("k0", "k1"):
        found.remove(name)
    assert found.excess("o") == []
    assert found.older_half() == ["l0", "l1", "l2", "l3", "l4"]
    assert KeyQuota().older_half() == []


def test_a_flood_of_one_key_evicts_no_other_key() -> None:
    matching = Matching(job(posted={}, off_policy={"supervised": {}}))
    matching.examples.quota.max_bytes = 80_000
    statuses: dict[str, tuple[str, str]] = {}

    def read(seq: int, item: Feedback) -> None:
        statuses.update({one.feedback: (one.status, one.reason) for one in matching.on_feedback(seq, item, NOW)})

    read(1, turn(0, [1], [2], name="honest", key_id="other"))
    for number in range(40):
        read(2 + number, turn(0, [300] * 400, [2], name=f"f{number}", episode=f"e{number}"))
        assert matching.examples.quota.nbytes <= 80_000 / 8 + 500
    assert statuses["f0"] == ("rejected", "too_many_waiting")
    assert statuses["f39"] == statuses["honest"] == ("matched", "")
