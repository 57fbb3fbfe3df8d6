"""Rows of the engine that a group holds: each completion frees its row for the next group."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.episode import requests_for
from penstock.services.rollout.group_maker import GroupMaker, HeldRows, room_for
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import PromptSource
from penstock.shared.models import build_tokenizer
from penstock.shared.protocol.generation import GenRequest
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket

JOB = {
    "name": "rows",
    "model": {"config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"type": "grpo", "group_size": 8},
    "train": {"batch_size": 8, "max_updates": 1},
    "sampling": {"max_new_tokens": 60},
}


@pytest.mark.parametrize(
    ("held", "num_waiting", "num_written", "room"),
    [(0, 0, 0, 2), (16, 0, 0, 0), (15, 0, 0, 1), (7, 0, 0, 2), (0, 1, 0, 1), (0, 2, 0, 0), (20, 0, 0, 0), (0, 0, 3, 0),
     (0, 0, 2, 2)],
)  # fmt: skip
def test_a_group_is_taken_where_its_first_completion_finds_a_row(
    held: int, num_waiting: int, num_written: int, room: int
) -> None:
    found = room_for(rows=16, completions=8, held=held, num_waiting=num_waiting, num_written=num_written)
    assert found == room


def test_a_group_larger_than_the_engine_is_taken_alone() -> None:
    assert room_for(rows=4, completions=8, held=0, num_waiting=0, num_written=0) == 1
    assert room_for(rows=4, completions=8, held=4, num_waiting=0, num_written=0) == 0


def test_a_group_that_fails_gives_all_its_rows_back() -> None:
    rows = HeldRows(lambda: None)
    with pytest.raises(ZeroDivisionError), rows.group(8) as free:
        free()
        assert (rows.number, rows.num_groups) == (7, 1)
        1 / 0  # noqa: B018
    assert (rows.number, rows.num_groups) == (0, 0)


async def test_each_completion_frees_its_row_and_equals_that_of_one_request_for_all() -> None:
    config = JobConfig.parse(JOB)
    tokenizer = build_tokenizer(config.model)
    engine = open_engine(config.model, tokenizer, max_running=8, seed=0)
    await engine.start()
    held: list[int] = []
    maker = GroupMaker("j", "w", config, engine, tokenizer, on_free=lambda: held.append(maker.held.number))
    prompt = PromptSource(config.data_config, tokenizer, config.seed).train(0)
    ticket = Ticket(draw=Draw(0), epoch=1, deadline=0.0, min_version=0)

    async def ask(*_: object) -> object:
        raise AssertionError("there is no environment")

    try:
        async with asyncio.timeout(60):
            group = await maker.make(ticket, prompt, "key", ask)  # type: ignore[arg-type]
            [(sampling, number)] = requests_for(config, ticket)
            request = GenRequest(request_id="all", prompt_ids=prompt.token_ids, n=number, sampling=sampling)
            expected = (await engine.generate(request)).samples
    finally:
        await engine.close()
    assert held == [7, 6, 5, 4, 3, 2, 1, 0, 0]
    assert len(set(group.cu_seqlens[1:] - group.cu_seqlens[:-1])) > 1, "the lengths must differ"
    assert group.token_ids.tolist() == [token for sample in expected for token in sample.token_ids]
