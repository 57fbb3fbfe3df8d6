"""Episodes with tools on a real engine: token ids, masks, log-probs and versions of each turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.rollout.conversations.episode_state import Ask
from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.services.rollout.conversations.turns import find_calls
from penstock.services.rollout.engines import Engine, open_engine
from penstock.services.rollout.group_maker import GroupMaker
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.base import with_overrides
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import PromptSource
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import JUDGEMENTS, ScoreReply, Ticket
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group, decode_group, encode_group

SIZE = 96
"""Number of episodes in a group, high enough that some have three turns."""

# With eight characters and four special tokens, a random policy often calls a tool and often ends.
JOB: dict[str, Any] = {
    "name": "agent",
    "seed": 3,
    "model": {
        "config": {"hidden_size": 32, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
                   "max_position_embeddings": 128},
        "tokenizer": "char",
        "characters": "012+=[];",
    },
    "data": {"train": {"type": "addition"}, "prompt": {"max_tokens": 8}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": SIZE},
    "environment": {
        "tools": [{"type": "calculator"}], "max_turns": 3, "max_observation_tokens": 6,
        "calls": {"begin": "[", "end": "]", "body": "text", "parallel": False},
        "observations": {"result": "{result};"},
    },
    "sampling": {"max_new_tokens": 40},
    "train": {"batch_size": SIZE, "max_updates": 1},
    "limits": {"byte_budget": 64 << 20},
}  # fmt: skip


class Tools:
    """Tools that record every call, and answer it with a number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.requests: list[ToolRequest] = []
        self.running = self.most = 0
        self.status: Any = "ok"

    async def __call__(self, clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        self.names.append(name)
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        place = len(self.names)
        await asyncio.sleep(0)
        self.running -= 1
        return ToolReply(status=self.status, text=f"{place % 3}" * 2)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job(*changes: str) -> JobConfig:
    return JobConfig.parse(with_overrides(JOB, changes))


class Player:
    """Player of groups of one job."""

    def __init__(self, config: JobConfig, engine: Engine) -> None:
        self.config, self.engine, self.tokenizer = config, engine, build_tokenizer(config.model)
        self.source = PromptSource(config.data_config, self.tokenizer, config.seed)
        assert config.environment is not None
        self.environment = config.environment
        self._maker = GroupMaker("j", "w", config, engine, self.tokenizer)

    async def play(self, call: Ask, ordinal: int = 0) -> Group:
        ticket = Ticket(draw=Draw(ordinal), epoch=1, deadline=0.0, min_version=0)
        async with asyncio.timeout(60):
            group = await self._maker.make(ticket, self.source.train(ordinal), "key", call)
        data, _ = encode_group(group)  # also checks that spans cover every token
        assert len(data) <= self.config.max_group_bytes
        return decode_group(data)

    def turns(self, group: Group, index: int) -> list[tuple[bool, str]]:
        """Split a trajectory into runs of tokens; return for each if the policy chose its tokens, and its text."""
        start, end = group.cu_seqlens[index], group.cu_seqlens[index + 1]
        mask, tokens = group.mask[start:end], group.token_ids[start:end]
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        return [
            (bool(mask[a]), str(self.tokenizer.decode(tokens[a:b].tolist())))
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]


def runs_of_zeros(mask: Any) -> list[int]:
    """Return the lengths of all observations; a token that the policy chose follows each of them."""
    return [len(run) for run in "".join(map(str, mask.tolist())).split("1") if run]


@pytest.fixture
async def open_player() -> AsyncIterator[Callable[..., Awaitable[Player]]]:
    engines: list[Engine] = []

    async def open_(*changes: str) -> Player:
        config = job(*changes)
        rows = config.placement.max_running
        engine = open_engine(config.model, build_tokenizer(config.model), max_running=rows, seed=config.seed)
        engines.append(engine)
        await engine.start()
        return Player(config, engine)

    yield open_
    for engine in engines:
        await engine.close()


async def test_turns_calls_and_observations(open_player: Any) -> None:
    player, tools = await open_player(), Tools()
    group = await player.play(tools)
    assert not group.failed.any()
    asked, lengths = 0, set()
    for index in range(SIZE):
        runs = player.turns(group, index)
        lengths.add(len(runs))
        assert [chosen for chosen, _ in runs] == [i % 2 == 0 for i in range(len(runs))]
        for (_, turn), (_, observation) in zip(runs[::2], runs[1::2], strict=False):
            assert turn.endswith("]"), "the turn ended with its call"
            assert "[" in turn
            assert observation in ("00;", "11;", "22;")
            asked += 1
        chosen = group.mask[group.cu_seqlens[index] : group.cu_seqlens[index + 1]].sum()
        assert chosen <= 40, "of all turns together"
        last = runs[-1][1]
        calls_again = last.endswith("]") and "[" in last
        assert FINISH_REASONS[group.finish[index]] == ("length" if calls_again or chosen == 40 else "stop")
        transcript, answer = group.meta["transcripts"][index], group.meta["completions"][index]
        assert transcript == "".join(text for _, text in runs[:-1]) + answer
    assert lengths == {1, 3, 5}
    assert asked == len(tools.names) == len(set(tools.names)) > 10
    assert all(set(request.arguments) == {"expression"} for request in tools.requests)
    assert tools.most > 1, "episodes do not wait for each other"


async def test_the_trainer_finds_the_log_probs_that_were_recorded(open_player: Any) -> None:
    player = await open_player()
    group = await player.play(Tools())
    rewards = np.arange(SIZE, dtype=np.float32) % 2
    group = group.scored(ScoreReply(rewards=rewards.tolist(), failed=[False] * SIZE, parts={}, errors=[]))
    learner = Learner(player.config)
    for index in range(SIZE):
        start, end = group.cu_seqlens[index], group.cu_seqlens[index + 1]
        tokens = torch.tensor([*group.prompt_ids.tolist(), *group.token_ids[start:end].tolist()])
        with torch.no_grad():
            logprobs = learner.model(tokens[None]).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, tokens[1:, None])[len(group.prompt_ids) - 1 :, 0].numpy()
        chosen = group.mask[start:end] == 1
        assert np.abs(own - group.logprobs[start:end])[chosen].max() < 1e-4
    metrics = learner.update(BatchShard.whole([group]), update_index=0)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["tokens/scored"] == group.mask.sum()
    assert metrics["tokens/observed"] == (group.mask == 0).sum() > 0


async def test_an_episode_plays_again_the_same_way(open_player: Any) -> None:
    """The seed of a turn depends on draw, completion and turn only, not on other requests in the batch."""

    async def answer(clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        return ToolReply(status="ok", text=str(len(request.arguments["expression"])))

    one, two = [await (await open_player(f"placement.max_running={n}")).play(answer) for n in (96, 31)]
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert one.attempt != two.attempt


async def test_new_weights_between_two_turns_show_in_the_spans(open_player: Any) -> None:
    player, other = await open_player(), Learner(job("seed=4"))
    committed = asyncio.Event()

    async def call(clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        if not committed.is_set():
            committed.set()
            engine = player.engine
            await engine.begin_update(version=1, digest="d", mode="swap")
            await engine.load_chunk({name: tensor.clone() for name, tensor in other.weights()})
            await engine.commit_update()
        while (await player.engine.weight_info()).version < 1:
            await asyncio.sleep(0.001)
        return ToolReply(status="ok", text="1")

    group = await player.play(call)
    mixed = 0
    for index in range(SIZE):
        runs = player.turns(group, index)
        spans = group.spans[group.spans[:, 0] == index].tolist()
        versions = np.concatenate([np.full(end - start, version) for _, version, start, end in spans])
        assert (np.diff(versions) >= 0).all()
        if len(runs) > 1:
            mixed += 1
            first_observed = int(np.flatnonzero(group.mask[group.cu_seqlens[index] :] == 0)[0])
            assert versions[0] == 0
            assert set(versions[first_observed:]) == {1}, "tokens read after the commit belong to the new version"
    assert mixed > 5


@pytest.mark.parametrize("max_calls", [1, 8])
async def test_parallel_calls_run_at_once_and_are_answered_in_order(open_player: Any, max_calls: int) -> None:
    changes = ["environment.calls.parallel=true", f"environment.calls.max_calls={max_calls}"]
    player = await open_player(*changes, "environment.max_observation_tokens=24")
    answered: list[str] = []

    async def call(clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        place = int(name.rpartition("/")[2])
        await asyncio.sleep(0.05 * (2 - place))  # the second call is answered first
        answered.append(name)
        return ToolReply(status="ok", text=str(place))

    group = await player.play(call)
    seen = set()
    for index in range(SIZE):
        runs = player.turns(group, index)
        for (_, turn), (_, observation) in zip(runs[::2], runs[1::2], strict=False):
            number = len(find_calls(turn, player.environment.calls, player.environment.tools))
            seen.add(number)
            if number > max_calls:
                assert observation.startswith("<unk>"), "the alphabet lacks `error: ...`"
            else:
                assert observation.replace("<unk>", "?").startswith("0;1;2;"[: 2 * number])
    assert seen >= {1, 2}
    turns = {name.rpartition("/")[0] for name in answered}
    orders = [[name for name in answered if name.rpartition("/")[0] == turn] for turn in turns]
    assert any(order != sorted(order) for order in orders) == (max_calls > 1)


@pytest.mark.parametrize(("mode", "failed"), [("fail", True), ("observe", False)])
async def test_a_failed_tool_fails_the_trajectory_or_is_observed(open_player: Any, mode: str, failed: bool) -> None:
    player, tools = await open_player(f"environment.on_tool_failure={mode}"), Tools()
    tools.status = "failed"
    group = await player.play(tools)
    called = [len(player.turns(group, index)) > 1 for index in range(SIZE)]
    if failed:
        assert 0 < group.failed.sum() < SIZE, "only trajectories with a call"
        assert not any(called)
        assert group.meta["error"] in ("00", "11", "22")
        assert (group.finish[group.failed] == 2).all()
    else:
        assert not group.failed.any()
        observations = [text for index in range(SIZE) for chosen, text in player.turns(group, index) if not chosen]
        assert observations
        assert all(text.startswith("<unk>") for text in observations), "the alphabet lacks `error: ...`"
        assert all(count <= 6 for count in runs_of_zeros(group.mask)), "observations are cut to max_observation_tokens"


async def test_a_lost_state_fails_its_trajectory_even_if_failures_are_observed(open_player: Any) -> None:
    player, tools = await open_player("environment.on_tool_failure=observe"), Tools()

    async def call(clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        return ToolReply(status="failed", text=(await tools(clock, name, request)).text, gone=True)

    group = await player.play(call)
    assert 0 < group.failed.sum() < SIZE, "only trajectories with a call"
    assert not any(len(player.turns(group, index)) > 1 for index in range(SIZE))


async def test_a_turn_that_takes_too_long_fails_its_trajectory(open_player: Any) -> None:
    player = await open_player("environment.tool_timeout_s=0.5", "environment.turn_timeout_s=0.5")
    called: set[int] = set()

    async def call(clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        called.add(int(name.rpartition(".")[2].partition("/")[0]))
        await asyncio.sleep(60)
        raise AssertionError("it was given up before")

    group = await player.play(call)
    assert called
    assert group.failed[sorted(called)].all()
    assert "a turn took longer than environment.turn_timeout_s (0.5 s)" in group.meta["error"]
    async with asyncio.timeout(30):
        while player.engine.running:
            await asyncio.sleep(0.01)


async def test_a_turn_that_is_too_long_is_cut_off(open_player: Any) -> None:
    player = await open_player("environment.max_turn_tokens=4", "sampling.max_new_tokens=10")
    group = await player.play(Tools())
    for index in range(SIZE):
        tokens, mask = (
            values[group.cu_seqlens[index] : group.cu_seqlens[index + 1]] for values in (group.token_ids, group.mask)
        )
        assert mask.sum() <= 10
        turns = np.split(tokens[mask == 1], np.flatnonzero(np.diff(np.flatnonzero(mask)) > 1) + 1)
        assert max(map(len, turns)) <= 4
        if len(turns[-1]) == 4 and tokens[-1] not in (player.tokenizer.eos_token_id, player.tokenizer.encode("]")[0]):
            assert FINISH_REASONS[group.finish[index]] == "length"
    assert (group.finish == FINISH_REASONS.index("length")).any()


async def test_a_turn_whose_results_cannot_fit_is_refused_before_the_first(open_player: Any) -> None:
    player, tools = (
        await open_player("environment.observations={before: '====', after: '==', result: '{result};'}"),
        Tools(),
    )
    with pytest.raises(ConfigError, match="leaves no room for 1 results"):
        await player.play(tools)
    assert not tools.names


async def test_nothing_outlives_a_group_that_fails(open_player: Any) -> None:
    player = await open_player("environment.calls.parallel=true", "environment.max_observation_tokens=24")
    begun, ended = [], []

    async def call(clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        begun.append(name)
        try:
            if len(begun) < 5:
                await asyncio.sleep(60)
            raise ConfigError("this call breaks the group")
        finally:
            ended.append(name)

    with pytest.raises(ConfigError, match="breaks the group"):
        await player.play(call)
    assert sorted(ended) == sorted(begun)
    async with asyncio.timeout(30):
        while player.engine.running:
            await asyncio.sleep(0.01)


async def test_a_model_too_short_for_the_longest_episode_is_refused(open_player: Any) -> None:
    player = await open_player()
    player.engine.max_length = 54
    with pytest.raises(ConfigError, match="of the policy \\+ 12 of observations exceed the 54"):
        await player.play(Tools())


@pytest.mark.long
async def test_time_in_the_queue_of_the_engine_does_not_count(open_player: Any) -> None:
    limit_s = 1.5
    player = await open_player(
        "algorithm.group_size=2", "train.batch_size=2", "sampling.max_new_tokens=4",
        "environment.tool_timeout_s=1", f"environment.turn_timeout_s={limit_s}",
    )  # fmt: skip
    await player.engine.pause("keep")
    playing = asyncio.create_task(player.play(Tools()))
    done, _ = await asyncio.wait([playing], timeout=limit_s + 0.5)
    assert not done, "no turn ends while all of them wait"
    await player.engine.resume()
    assert not (await playing).failed.any()


SHOP = {"type": "method", "name": "calculator", "path": "shop:Shop", "description": "d", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"],
}}  # fmt: skip


class Holders:
    """Env workers that hold tool states; at each request number in ``deaths``, the asking episode loses its state."""

    def __init__(self, *deaths: int) -> None:
        self.deaths = list(deaths)
        self.requests: list[ToolRequest] = []
        self.counts: dict[str, int] = {}
        self.ended: list[str] = []
        self.lost: list[str] = []

    async def __call__(self, clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        state = request.state
        assert state is not None
        self.requests.append(request)
        if request.purpose == "end":
            self.ended.append(state.episode)
            return ToolReply(status="ok", text="")
        assert state.number == self.counts.get(state.episode, 0), "requests of an episode arrive in order"
        assert bool(state.holder) == bool(state.number)
        if self.deaths and len(self.requests) >= self.deaths[0]:
            self.deaths.pop(0)
            self.lost.append(state.episode)
            return ToolReply(status="lost", text="the worker died")
        self.counts[state.episode] = state.number + 1
        text = "0.5" if request.purpose == "reward" else str(state.number)
        return ToolReply(status="ok", text=text, holder="h")


def stateful(*changes: str) -> list[str]:
    return [f"environment.tools=[{SHOP}]", "reward.scorers=[{type: environment}]", *changes]


async def test_state_belongs_to_an_episode(open_player: Any) -> None:
    player, holders = await open_player(*stateful()), Holders()
    group = await player.play(holders)
    assert not group.failed.any()
    calls = [r for r in holders.requests if r.purpose == "call"]
    assert len({r.state.seed for r in calls if r.state}) == 1, "the episodes of a draw begin in the same state"
    assert all(bool(r.state.row) == (r.state.number == 0) for r in calls if r.state)
    for index in range(SIZE):
        observations = [text for chosen, text in player.turns(group, index) if not chosen]
        assert observations == [f"{i};" for i in range(len(observations))], (
            "each call continues from the state of its episode"
        )
    assert sum(r.purpose == "reward" for r in holders.requests) == SIZE, "all are judged, with or without calls"
    assert group.meta["row"][JUDGEMENTS] == [0.5] * SIZE
    assert sorted(holders.ended) == sorted(holders.counts)
    other = Holders()
    await player.play(other, ordinal=1)
    assert other.requests[0].state.seed != calls[0].state.seed


@pytest.mark.parametrize("restarts", [0, 1])
async def test_an_episode_whose_state_is_lost_is_begun_again_or_has_failed(open_player: Any, restarts: int) -> None:
    player = await open_player(*stateful(f"environment.restarts={restarts}"))
    holders = Holders(20, 60)
    group = await player.play(holders)
    assert len(holders.lost) == 2
    if not restarts:
        assert group.failed.sum() == 2
        assert group.meta["error"] == "the worker died (environment.restarts: 0)"
        return
    assert not group.failed.any()
    again = {r.state.episode for r in holders.requests if r.state and r.state.episode.endswith("+1")}
    assert again == {f"{episode}+1" for episode in holders.lost}
    whole = await player.play(Holders())
    assert group.token_ids.tolist() == whole.token_ids.tolist(), "the same seed leads to the same episode"
    assert group.mask.tolist() == whole.mask.tolist()
