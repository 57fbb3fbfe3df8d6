"""Packing keeps every token behind its context, pads nothing and depends on nothing but its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.services.trainer.batch.facts import gather_facts
from penstock.services.trainer.batch.minibatches import Minibatch, minibatches
from penstock.services.trainer.batch.packing import columns_of, columns_of_rows, microbatches
from penstock.services.trainer.ranks.collective import Alone
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trajectory import Group

Make = Callable[..., Group]


def all_rows(groups: list[Group]) -> np.ndarray:
    return np.arange(len(columns_of(groups).group_B))


def expected_tokens(groups: list[Group]) -> dict[int, list[tuple[list[int], int, float]]]:
    """Return (context, next token, behaviour log-prob) of every scored token, by row."""
    found, row = {}, 0
    for group in groups:
        for i in range(group.num_trajectories):
            if group.failed[i]:
                continue
            start, end = group.cu_seqlens[i : i + 2]
            sequence = [*group.prompt_ids.tolist(), *group.token_ids[start:end].tolist()]
            prompt = len(group.prompt_ids)
            found[row] = [
                (sequence[: prompt + j], sequence[prompt + j], float(group.logprobs[start + j]))
                for j in range(end - start)
                if group.mask[start + j]
            ]
            row += 1
    return found


@pytest.mark.parametrize("max_tokens", [16, 40, 10_000])
def test_every_scored_token_appears_once_behind_its_own_context(batch: list[Group], max_tokens: int) -> None:
    columns = columns_of(batch)
    found: dict[int, list[tuple[list[int], int, float]]] = {}
    for micro in microbatches(columns, all_rows(batch), max_tokens):
        cu = micro.tokens.cu_seqlens_S1.tolist()
        ids, positions = micro.tokens.token_ids_T.tolist(), micro.tokens.position_ids_T.tolist()
        for index, target, row, logprob, length in zip(
            *(t.tolist() for t in (micro.select_M, micro.targets_M, micro.rows_M, micro.behaviour_M, micro.lengths_M)),
            strict=True,
        ):
            start = max(c for c in cu if c <= index)
            assert positions[start : index + 1] == list(range(index + 1 - start))
            assert length == columns.scored_B[row]
            found.setdefault(row, []).append((ids[start : index + 1], target, logprob))
    assert found == {row: tokens for row, tokens in expected_tokens(batch).items() if tokens}


def test_no_position_is_padding(batch: list[Group]) -> None:
    micro = microbatches(columns_of(batch), all_rows(batch), 10_000)[0]
    kept = [(g, i) for g in batch for i in range(4) if not g.failed[i]]
    total = sum(
        len(g.prompt_ids) + int(g.lengths[i]) - 1 for g, i in kept if g.mask[slice(*g.cu_seqlens[i : i + 2])].any()
    )
    assert micro.tokens.num_tokens == sum(micro.tokens.lengths) == total


def test_microbatches_keep_to_the_limit_and_are_few(make_group: Make) -> None:
    groups = [make_group(i) for i in range(20)]
    packs = microbatches(columns_of(groups), all_rows(groups), 128)
    total = sum(m.tokens.num_tokens for m in packs)
    assert all(m.tokens.num_tokens <= 128 for m in packs)
    assert len(packs) <= -(-total // 128) + 2


def test_a_sequence_above_the_limit_is_not_cut(make_group: Make) -> None:
    groups = [make_group(0, [1, 0], lengths=[3, 60], prompt_length=5)]
    packs = microbatches(columns_of(groups), all_rows(groups), 16)
    assert sorted(m.tokens.lengths for m in packs) == [(7,), (64,)]


def test_failed_trajectories_are_left_out(batch: list[Group]) -> None:
    columns = columns_of(batch)
    assert (len(columns.group_B), columns.num_failed, columns.num_groups) == (15, 1, 4)
    assert columns.rewards_B.tolist() == [1, 0, 0, 1, 0, 0.5, 0, 0, 1, 0, 0, 1, 1, 1, 1]


def test_a_trajectory_without_tokens_keeps_its_reward_and_scores_nothing(make_group: Make) -> None:
    group = make_group(0, [1, 0], lengths=[0, 4])
    group = replace(group, spans=group.spans[1:])
    group.check()
    columns = columns_of([group])
    packs = microbatches(columns, np.arange(2), 1000)
    assert columns.rewards_B.tolist() == [1, 0]
    assert [m.rows_M.unique().tolist() for m in packs] == [[1]]


def cut(groups: list[Group], *, number: int, **rows: np.ndarray) -> list[Minibatch]:
    columns = columns_of(groups)
    facts = gather_facts(columns, BatchShard.whole(groups), Alone())
    nobody = {name: np.zeros(len(columns.group_B), bool) for name in ("skip_B", "excluded_B")}
    return minibatches(columns, facts, Alone(), number=number, max_tokens=10_000, **(nobody | rows))


def rows_of(part: Minibatch) -> set[int]:
    return set(torch.cat([m.rows_M for m in part.microbatches if m is not None]).tolist())


def test_minibatches_are_runs_of_whole_groups_in_manifest_order(batch: list[Group]) -> None:
    columns = columns_of(batch)
    parts = cut(batch, number=2)
    assert rows_of(parts[0]) <= set(range(7))
    assert rows_of(parts[1]) <= set(range(7, 15))
    assert [p.num_tokens for p in parts] == [int(columns.scored_B[:7].sum()), int(columns.scored_B[7:].sum())]


def test_skipped_rows_count_in_the_denominators_and_excluded_ones_do_not(batch: list[Group]) -> None:
    columns, late = columns_of(batch), np.arange(15) >= 11
    (full,) = cut(batch, number=1)
    (skipped,) = cut(batch, number=1, skip_B=late)
    (excluded,) = cut(batch, number=1, excluded_B=late)
    assert (skipped.num_tokens, skipped.num_sequences) == (full.num_tokens, full.num_sequences)
    assert excluded.num_tokens == int(columns.scored_B[:11].sum()) < full.num_tokens
    assert excluded.num_sequences == full.num_sequences - 4
    assert rows_of(skipped) == rows_of(excluded) == rows_of(full) - {11, 12, 13, 14}


def test_an_empty_prompt_is_refused(make_group: Make) -> None:
    group = replace(make_group(7), prompt_ids=np.zeros(0, np.int32))
    with pytest.raises(ProtocolError, match=r"group 7\.0 .* empty prompt"):
        columns_of([group])


def test_a_batch_of_failures_is_refused(make_group: Make) -> None:
    group = make_group(0, failed=[0, 1, 2, 3])
    with pytest.raises(ProtocolError, match="all 4 trajectories"):
        gather_facts(columns_of([group]), BatchShard.whole([group]), Alone())


def test_the_greedy_completion_is_a_baseline_and_no_row(make_group: Make) -> None:
    group = make_group(0, [1, 0, 0, 0.25])
    columns = columns_of([replace(group, greedy=np.array([False, False, False, True]))])
    assert columns.rewards_B.tolist() == [1, 0, 0]
    assert (columns.baseline_G.tolist(), columns.num_failed) == ([0.25], 0)


def test_no_group_at_all_makes_empty_columns() -> None:
    columns = columns_of([])
    assert (len(columns.group_B), len(columns.tokens), columns.num_groups) == (0, 0, 0)
    assert len(columns.counted()) == 0


def test_supervised_rows_score_the_whole_answer() -> None:
    columns = columns_of_rows([([5, 6], [7, 2]), ([8], [9, 10, 2])])
    (micro,) = microbatches(columns, np.arange(2), 100)
    assert micro.tokens.token_ids_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert micro.select_M.tolist() == [1, 2, 3, 4, 5]
    assert micro.targets_M.tolist() == [7, 2, 9, 10, 2]
