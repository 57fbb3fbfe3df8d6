"""Laws of credit over branches: returns against a closed form, trees against a search, weights against the mean."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.services.coordinator.online.credit import (
    HEADER_TOKENS,
    ROOT,
    TurnTokens,
    TurnTree,
    branch_shares,
    returns,
    turn_tree,
)

LAWS = settings(max_examples=40, deadline=None)


@st.composite
def forests(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(1, 12))
    return tuple(draw(st.integers(ROOT, place - 1)) for place in range(size))


TOKENS = st.lists(st.integers(0, 2), max_size=5)
EPISODES = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=9)
WORTH = st.integers(-4, 4).map(float)


def path(parents: Sequence[int], place: int) -> list[int]:
    """Return the positions of a turn and of its ancestors, the turn first."""
    found = [place]
    while parents[found[-1]] != ROOT:
        found.append(parents[found[-1]])
    return found


@LAWS
@given(forests(), st.data(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_a_return_is_the_discounted_mean_over_all_paths(
    parents: tuple[int, ...], data: st.DataObject, gamma: float
) -> None:
    """``G_t = Σ_d r_d · gamma^(steps to d) · Π (1 / children of each turn on the path)``."""
    rewards = data.draw(st.lists(WORTH, min_size=len(parents), max_size=len(parents)))
    found = returns(rewards, gamma, TurnTree(parents, (True,) * len(parents)))
    for place in range(len(parents)):
        expected = 0.0
        for later in range(place, len(parents)):
            way = path(parents, later)
            if place in way:
                on_the_way = way[1 : way.index(place) + 1]
                chance = 1.0
                for turn in on_the_way:
                    chance /= parents.count(turn)
                expected += rewards[later] * gamma ** len(on_the_way) * chance
        assert found[place] == pytest.approx(expected)


@LAWS
@given(st.lists(WORTH, min_size=1, max_size=12), st.sampled_from([0.0, 0.5, 1.0]))
def test_one_branch_has_the_returns_of_a_chain(rewards: list[float], gamma: float) -> None:
    tree = TurnTree(tuple(range(-1, len(rewards) - 1)), (False,) * len(rewards))
    expected, later = list[float](), 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        expected.append(later)
    assert returns(rewards, gamma, tree, [False] * len(rewards)) == returns(rewards, gamma) == expected[::-1]


@LAWS
@given(forests(), st.data())
def test_untrained_turns_without_feedback_dilute_nothing(parents: tuple[int, ...], data: st.DataObject) -> None:
    rewards = data.draw(st.lists(WORTH, min_size=len(parents), max_size=len(parents)))
    place = data.draw(st.integers(0, len(parents) - 1))
    tree = TurnTree(parents, (True,) * len(parents))
    before = returns(rewards, 0.5, tree)
    mute = TurnTree((*parents, place), (*tree.extends, True))
    after = returns([*rewards, 3.0], 0.5, mute, [True] * len(parents) + [False])
    if place in parents:
        assert after[:-1] == before
    else:
        assert after[place] == rewards[place] + 1.5, "the only continuation"


@LAWS
@given(EPISODES)
def test_the_tree_equals_an_exhaustive_search(turns: list[tuple[list[int], list[int]]]) -> None:
    """The search takes the longest earlier prompt with its answer that begins a prompt; of equal ones, the newest."""
    tree = turn_tree([TurnTokens.of(*one) for one in turns])
    wholes = [prompt + answer for prompt, answer in turns]
    for place, (prompt, _) in enumerate(turns):
        fits = [n for n in range(place) if wholes[n] and prompt[: len(wholes[n])] == wholes[n]]
        assert tree.extends[place] == bool(fits)
        if fits:
            assert tree.parents[place] == max(fits, key=lambda n: (len(wholes[n]), n))
        assert ROOT <= tree.parents[place] < place
    assert [place in tree.below(root) for place, root in enumerate(tree.roots)] == [True] * len(turns)


def continues(before: list[int], prompt: list[int]) -> bool:
    """Return True if ``prompt`` begins with ``before``, except for up to four last tokens that both share."""
    cuts = [cut for cut in range(HEADER_TOKENS + 1) if cut < len(before) < len(prompt)]
    return any(prompt[: len(before) - cut] + prompt[len(prompt) - cut :] == before for cut in cuts)


@LAWS
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), TOKENS), min_size=1, max_size=9))
def test_a_rendered_prompt_extends_the_newest_turn_of_its_conversation(
    turns: list[tuple[list[int], list[int]]],
) -> None:
    tree, parents = turn_tree([TurnTokens.of(*one) for one in turns]), list[int]()
    for place, (prompt, _) in enumerate(turns):
        begun = [n for n in range(place) if continues(turns[n][0], prompt)]
        parent = tree.parents[place] if tree.extends[place] else ROOT
        if begun and not tree.extends[place]:
            first = max(begun, key=lambda n: (len(turns[n][0]), n))
            parent = max(n for n in range(place) if first in path(parents, n))
        parents.append(parent)
    for place, parent in enumerate(parents):
        is_open = any(earlier < place for earlier in parents[place + 1 :] if earlier != ROOT)
        assert tree.parents[place] == (place - 1 if parent == ROOT and not is_open else parent)


@LAWS
@given(EPISODES)
def test_a_branch_begins_only_while_another_conversation_continues(turns: list[tuple[list[int], list[int]]]) -> None:
    tree = turn_tree([TurnTokens.of(*one) for one in turns])
    for place in range(1, len(turns)):
        if tree.parents[place] == ROOT:
            assert any(tree.parents[later] in range(place) for later in range(place + 1, len(turns)))


@LAWS
@given(st.lists(TOKENS.filter(bool), min_size=1, max_size=6), st.booleans())
def test_a_continued_conversation_is_one_branch(answers: list[list[int]], again: bool) -> None:
    """This holds even if several turns have the same tokens."""
    turns, so_far = list[TurnTokens](), [9]
    for answer in answers:
        turns.append(TurnTokens.of(so_far, answer))
        so_far = [*so_far, *answer, *([9] if again else [])]
    assert turn_tree(turns).parents == tuple(range(-1, len(answers) - 1))


@LAWS
@given(forests(), st.data())
def test_the_weighted_sum_over_parts_is_the_mean_over_branches(parents: tuple[int, ...], data: st.DataObject) -> None:
    """If the loss of a part is a sum over its tokens: ``Σ_p share_p · L_p = 1/B · Σ_b Σ_{p in b} L_p``."""
    size = len(parents)
    losses = data.draw(st.lists(WORTH, min_size=size, max_size=size))
    ends = sorted(set(range(size)) - set(parents))
    mean = sum(losses[part] for end in ends for part in path(parents, end)) / len(ends)
    shares = branch_shares(parents)
    assert sum(share * loss for share, loss in zip(shares, losses, strict=True)) == pytest.approx(mean)
    assert sum(shares[place] for place in range(size) if parents[place] == ROOT) >= 1 - 1e-9
    if len(ends) == 1:
        assert shares == [1.0] * size, "one branch has shares of exactly 1"


@LAWS
@given(forests(), st.data())
def test_with_lengths_each_branch_is_one_sequence(parents: tuple[int, ...], data: st.DataObject) -> None:
    """If the loss of a part is a mean over its tokens, a branch is the mean over all of its tokens."""
    size = len(parents)
    losses = data.draw(st.lists(st.integers(-4, 4).map(Fraction), min_size=size, max_size=size))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    ends = sorted(set(range(size)) - set(parents))
    branches = [path(parents, end) for end in ends]
    means = [sum(losses[p] * lengths[p] for p in one) / sum(lengths[p] for p in one) for one in branches]
    shares = branch_shares(parents, lengths)
    found = sum(share * float(loss) for share, loss in zip(shares, losses, strict=True))
    assert found == pytest.approx(float(sum(means) / len(ends)))
    assert sum(shares) == pytest.approx(1.0), "an episode weighs as much as one trajectory"
    assert all(0 < share <= 1 for share in shares)
