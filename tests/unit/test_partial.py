"""Records of completions in progress, and the choice of those that a worker continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.services.rollout.commit_rule import Attempt, CommitRule
from penstock.services.rollout.engines.requests import check_request, rest_of
from penstock.services.rollout.partial import PartialGroups
from penstock.services.rollout.tickets import HandedOver
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.errors import ConfigError, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.frame import decode_frame, encode_frame
from penstock.shared.protocol.generation import Constraint, GenRequest, Sample, Sampling, Span
from penstock.shared.protocol.partial import decode_partial, encode_partial, recipe_of
from penstock.shared.protocol.trajectory import Group
from penstock.shared.transport.bus import Message, Outgoing

SIZE = 3
PROMPT = [5, 6]
ASKED = [(Sampling(max_new_tokens=8, seed=1), SIZE)]
RECIPE = recipe_of(PROMPT, ASKED)
EOS = 2


def sample(*versions: int, finish: str = "abort") -> Sample:
    """Return a sample with two tokens of each version."""
    spans = [Span(version, 2 * i, 2 * i + 2, f"w{version}") for i, version in enumerate(versions)]
    num = 2 * len(versions)
    logprobs = (-np.arange(num, dtype=np.float32) / 3).tolist()
    return Sample(token_ids=list(range(7, 7 + num)), logprobs=logprobs, finish=finish, spans=spans)  # type: ignore[arg-type]


@pytest.mark.parametrize("finish", ["abort", "stop", "length"])
def test_a_record_returns_the_saved_sample(finish: str) -> None:
    saved = sample(3, 4, finish=finish)
    assert decode_partial(encode_partial(saved, RECIPE), RECIPE) == saved


def test_the_recipe_depends_on_prompt_and_sampling() -> None:
    others = [
        recipe_of([5, 7], ASKED),
        recipe_of(PROMPT, [(replace(ASKED[0][0], seed=2), SIZE)]),
        recipe_of(PROMPT, [(replace(ASKED[0][0], temperature=0.5), SIZE)]),
        recipe_of(PROMPT, [(ASKED[0][0], SIZE + 1)]),
    ]
    assert len({RECIPE, *others}) == 5
    assert recipe_of(tuple(PROMPT), ASKED) == RECIPE
    for other in others:
        with pytest.raises(ProtocolError, match="another prompt"):
            decode_partial(encode_partial(sample(3), RECIPE), other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema"),
        ({"kind": "Group"}, "schema"),
        ({"logprobs": np.zeros(3, np.float32)}, "3 log-probs"),
        ({"logprobs": np.zeros(4, np.float64)}, "float32"),
        ({"token_ids": np.zeros((2, 2), np.int32)}, "one dimension"),
        ({"token_ids": [1, 2, 3, 4]}, "int32"),
        ({"spans": [[3, 0, 2, ""]]}, "spans of 2"),
        ({"spans": [[3, 0, 2, ""], [4, 3, 4, ""]]}, "follow"),
        ({"spans": [["3", 0, 4, ""]]}, "lacks"),
        ({"finish": "tired"}, "4 tokens"),
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any], reason: str) -> None:
    tree = decode_frame(encode_partial(sample(3, 4), RECIPE))
    data = b"".join(encode_frame(tree | change))
    with pytest.raises(ProtocolError, match=reason):
        decode_partial(data, RECIPE)
    for part in ("spans", "token_ids", "finish"):
        with pytest.raises(ProtocolError, match="lacks"):
            decode_partial(b"".join(encode_frame({k: v for k, v in tree.items() if k != part})), RECIPE)
    with pytest.raises(ProtocolError):
        decode_partial(b"nonsense", RECIPE)


def test_a_continued_request_gets_the_remaining_limits_and_another_seed() -> None:
    sampling = Sampling(max_new_tokens=8, min_new_tokens=3, seed=1)
    request = GenRequest(request_id="a", prompt_ids=PROMPT, sampling=sampling)
    assert rest_of(request) is request
    rests = [rest_of(replace(request, begun=sample(*versions))) for versions in [(3,), (3, 4)]]
    assert [(one.sampling.max_new_tokens, one.sampling.min_new_tokens) for one in rests] == [(6, 1), (4, 0)]
    assert len({sampling.seed, *(one.sampling.seed for one in rests)}) == 3, "random numbers are not repeated"
    assert rest_of(replace(request, begun=sample(3, 4))) == rests[1]
    assert rests[0].input_ids == [5, 6, 7, 8]


def test_a_constrained_request_cannot_be_continued() -> None:
    request = GenRequest(request_id="a", prompt_ids=PROMPT, sampling=ASKED[0][0], begun=sample(3))
    check_request(request, vocab_size=100, max_length=100)
    constrained = replace(request, constraint=Constraint(asked_by="response_format", json_schema="{}"))
    with pytest.raises(ConfigError, match="without a constraint"):
        check_request(constrained, vocab_size=100, max_length=100)


# -- groups ---------------------------------------------------------------------------------------------------------


class Stream:
    """Stand-in for the stream PARTIAL."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.error: Exception | None = None

    async def last(self, stream: str, subject: str) -> Message | None:
        assert stream == subjects.PARTIAL
        if self.error is not None:
            raise self.error
        data = self.data.get(subject)
        return Message(subject, data, {}, 1, 0.0) if data is not None else None

    async def publish_many(self, messages: Sequence[Outgoing], *, deadline_s: float) -> list[int]:
        if self.error is not None:
            raise self.error
        self.data |= {message.subject: message.data for message in messages}
        return []


class Written:
    """Stand-in for an engine that returns the tokens so far of its requests."""

    stop_ids = (EOS,)

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self.aborted: set[str] = set()

    async def written(self, request_ids: set[str]) -> dict[str, Sample]:
        return {name: one for name, one in self.samples.items() if name in request_ids}

    async def abort(self, request_ids: set[str]) -> int:
        self.aborted |= request_ids
        return len(request_ids)


class Bench:
    """Partial groups of a worker that serves version 5 of a job with ``max_lag`` 2."""

    def __init__(self, **rollout: Any) -> None:
        config = parse_job(
            {
                "name": "partial",
                "model": {"config": {}, "tokenizer": "char"},
                "data": {"train": {"type": "addition"}},
                "reward": {"scorers": [{"type": "exact"}]},
                "algorithm": {"group_size": SIZE},
                "train": {"batch_size": SIZE, "max_updates": 1, "max_lag": 2},
                "sampling": {"max_new_tokens": 8},
                "rollout": {"checkpoint_s": 0.02, **rollout},
            }
        )
        assert isinstance(config, JobConfig)
        self.config, self.stream, self.engine, self.version = config, Stream(), Written(), 5
        self.rule = CommitRule(config.rollout, self.engine)  # type: ignore[arg-type]
        self.partial = PartialGroups(
            self.stream, "job", config, engine=self.engine, rule=self.rule, policy=self,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def digest(self) -> str:
        return f"w{self.version}"

    async def reach(self, *_: object, **__: object) -> None:
        """Do nothing; the interface ``Versions`` has this method."""

    def store(self, place: int, saved: Sample, recipe: str = RECIPE) -> None:
        self.stream.data[subjects.partial("job", "train:0.0", place)] = encode_partial(saved, recipe)

    def stored(self) -> dict[int, Sample]:
        return {int(name.rpartition(".")[2]): decode_partial(data, RECIPE) for name, data in self.stream.data.items()}

    async def begun(self, *, repeated: bool = True, oldest: int = 3) -> dict[int, Sample]:
        """Start the next generation of the ticket; return the completions with which it begins."""
        found: dict[int, Sample] = {}

        async def generate(attempt: Attempt) -> Group:
            found.update(attempt.begun)
            return None  # type: ignore[return-value]

        await self.partial.make("train:0.0", RECIPE, generate, repeated=repeated, oldest=oldest)
        return found


async def test_only_a_ticket_that_was_delivered_before_is_looked_up() -> None:
    bench = Bench()
    bench.store(0, sample(5))
    assert await bench.begun(repeated=False) == {}
    assert await bench.begun() == {0: sample(5)}
    assert bench.partial.continued_tokens == 2


async def test_each_completion_is_judged_by_itself() -> None:
    bench = Bench()
    bench.store(0, sample(3, 5))
    bench.store(1, sample(2, 5))
    bench.store(2, sample(5, finish="stop"), recipe_of([5, 7], ASKED))
    assert await bench.begun() == {0: sample(3, 5)}
    bench.stream.data[subjects.partial("job", "train:0.0", 1)] = b"nonsense"
    assert await bench.begun() == {0: sample(3, 5)}


@pytest.mark.parametrize(
    ("rule", "serving", "oldest", "versions", "goes_on"),
    [
        ("keep", 5, 0, (3,), True),
        ("keep", 5, 0, (2,), False),
        ("keep", 6, 0, (3, 6), False),
        ("keep", 5, 4, (3, 5), False),
        ("keep", 5, 4, (4, 6), True),
        ("drain", 5, 4, (4, 5), True),
        ("restart", 5, 0, (5,), True),
        ("restart", 5, 0, (4,), False),
        ("restart", 5, 0, (4, 5), False),
        ("restart", 5, 0, (6,), False),
    ],
)
async def test_tokens_that_the_gate_or_the_rule_refuses_begin_anew(
    rule: str, serving: int, oldest: int, versions: tuple[int, ...], goes_on: bool
) -> None:
    bench = Bench(on_update=rule)
    bench.version = serving
    bench.store(0, sample(*versions))
    assert await bench.begun(oldest=oldest) == ({0: sample(*versions)} if goes_on else {})


@pytest.mark.parametrize("rule", ["keep", "restart"])
async def test_tokens_of_other_weights_under_the_served_number_begin_anew(rule: str) -> None:
    bench = Bench(on_update=rule)
    bench.store(0, replace(sample(5), spans=[Span(5, 0, 2, "other")]))
    bench.store(1, sample(5))
    bench.store(2, replace(sample(4, 5), spans=[Span(4, 0, 2, "w4"), Span(5, 2, 4, "other")]))
    assert await bench.begun() == {1: sample(5)}


async def test_completions_whose_end_was_not_read_begin_anew() -> None:
    """If continued, the engine would write past the stop token, or refuse the request and so fail the ticket."""
    bench = Bench()
    longest = Sample(token_ids=[7] * 8, logprobs=[-1.0] * 8, finish="abort", spans=[Span(5, 0, 8, "w5")])
    stopped = replace(sample(5), token_ids=[7, EOS])
    bench.store(0, longest)
    bench.store(1, stopped)
    bench.store(2, replace(stopped, finish="stop"))
    assert await bench.begun() == {2: replace(stopped, finish="stop")}


async def test_an_unavailable_stream_costs_only_tokens(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.store(0, sample(5))
    bench.stream.error = Unavailable("no answer")
    assert await bench.begun() == {}
    assert "begins anew: no answer" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"checkpoint_s": 0}},
        {
            "model": {
                "config": {"arch": "qwen3_moe", "experts": {"number": 8, "per_token": 2}},
                "tokenizer": "char",
                "moe": {"router_replay": True},
            }
        },
        {"environment": {"tools": [{"type": "calculator"}], "max_observation_tokens": 8, "calls": {"begin": "["}}},
    ],
)
def test_groups_of_some_jobs_cannot_move(change: dict[str, Any]) -> None:
    bench = Bench()
    assert PartialGroups.is_possible(bench.config, bench.engine)  # type: ignore[arg-type]
    spec = bench.config.model_dump(mode="json", exclude_unset=True)
    assert not PartialGroups.is_possible(parse_job(spec | change), bench.engine)  # type: ignore[arg-type]


def test_groups_cannot_move_if_a_custom_engine_does_not_report_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    class Own:
        """Implements ``Engine`` as it was before groups could move."""

    assert not PartialGroups.is_possible(Bench().config, Own())  # type: ignore[arg-type]
    assert "no method 'written'" in caplog.text


class Running:
    """A running group whose completions have the requests r0, r1, r2; ``end`` ends one of them."""

    def __init__(self, bench: Bench) -> None:
        self.attempt: Attempt | None = None
        self.ended = asyncio.Event()
        self.task = asyncio.create_task(
            bench.partial.make("train:0.0", RECIPE, self.generate, repeated=False, oldest=3)
        )  # fmt: skip

    async def generate(self, attempt: Attempt) -> Group:
        attempt.requests.update({f"r{place}": place for place in range(SIZE)})
        self.attempt = attempt
        await self.ended.wait()
        return Group.__new__(Group)

    def end(self, place: int, finished: Sample) -> None:
        assert self.attempt is not None
        del self.attempt.requests[f"r{place}"]
        self.attempt.ended[place] = finished

    async def begin(self) -> Attempt:
        while self.attempt is None:
            await asyncio.sleep(0)
        return self.attempt


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.002)


async def test_a_group_that_runs_long_is_saved_and_its_ended_completions_once() -> None:
    bench = Bench()
    running = Running(bench)
    await running.begin()
    saving = asyncio.create_task(bench.partial.run())
    bench.engine.samples = {"r0": sample(5), "r1": sample(4, 5)}
    running.end(2, sample(5, finish="stop"))
    await until(lambda: len(bench.stream.data) == SIZE)
    assert bench.stored() == {0: sample(5), 1: sample(4, 5), 2: sample(5, finish="stop")}
    bench.engine.samples["r0"] = sample(5, 6)
    bench.stream.data.clear()
    await until(lambda: len(bench.stream.data) == 2)
    assert bench.stored() == {0: sample(5, 6), 1: sample(4, 5)}
    saving.cancel()
    running.ended.set()
    await running.task


async def test_a_group_that_ends_while_it_is_saved_is_left_out() -> None:
    bench = Bench()
    running = Running(bench)
    attempt = await running.begin()
    bench.engine.samples = {"r0": sample(5)}
    written = bench.engine.written

    async def slowly(request_ids: set[str]) -> dict[str, Sample]:
        running.ended.set()
        await running.task
        return await written(request_ids)

    bench.engine.written = slowly  # type: ignore[method-assign]
    await bench.partial.save([attempt])
    assert not bench.stream.data


async def test_a_full_stream_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    running = Running(bench)
    await running.begin()
    running.end(2, sample(5, finish="stop"))
    bench.stream.error = StreamFull("stream PARTIAL is full")
    saving = asyncio.create_task(bench.partial.run())
    await until(lambda: "are not saved: stream PARTIAL is full" in caplog.text)
    bench.stream.error = None
    await until(lambda: bench.stream.data)
    assert bench.stored() == {2: sample(5, finish="stop")}
    saving.cancel()
    running.ended.set()
    await running.task


async def test_a_completion_above_the_limit_of_a_message_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    running = Running(bench)
    attempt = await running.begin()
    num = MAX_INLINE_BYTES // 8
    large = Sample(token_ids=[7] * num, logprobs=[-1.0] * num, finish="abort", spans=[Span(5, 0, num)])
    bench.engine.samples = {"r0": large, "r1": sample(5)}
    await bench.partial.save([attempt])
    assert bench.stored() == {1: sample(5)}
    assert f"is not saved: {num} tokens" in caplog.text
    running.ended.set()
    await running.task


async def test_a_leaving_worker_saves_cut_off_completions_and_begins_nothing() -> None:
    bench = Bench()
    running = Running(bench)
    attempt = await running.begin()
    running.end(0, sample(5, finish="stop"))
    await bench.partial.hand_over()
    assert (attempt.handed_over, bench.engine.aborted) == (True, {"r1", "r2"})
    running.end(1, sample(4, 5))
    running.end(2, Sample(token_ids=[], logprobs=[], finish="abort", spans=[]))
    running.ended.set()
    with pytest.raises(HandedOver, match="6 tokens"):
        await running.task
    assert bench.stored() == {0: sample(5, finish="stop"), 1: sample(4, 5)}
    with pytest.raises(HandedOver, match="leaves"):
        await bench.begun()


async def test_a_leaving_worker_saves_everything_again() -> None:
    """The stream removes old records for newer ones, and a group with a missing record would lose tokens."""
    bench = Bench()
    running = Running(bench)
    attempt = await running.begin()
    running.end(0, sample(5, finish="stop"))
    assert await bench.partial.save([attempt])
    bench.stream.data.clear()
    assert await bench.partial.save([attempt])
    assert not bench.stream.data
    await bench.partial.hand_over()
    running.end(1, sample(4, 5))
    running.end(2, sample(5))
    running.ended.set()
    with pytest.raises(HandedOver):
        await running.task
    assert bench.stored() == {0: sample(5, finish="stop"), 1: sample(4, 5), 2: sample(5)}


async def test_an_older_save_does_not_replace_a_newer_one() -> None:
    bench = Bench()
    running = Running(bench)
    attempt = await running.begin()
    bench.engine.samples = {"r0": sample(5)}
    publish, sent, arrives = bench.stream.publish_many, asyncio.Event(), asyncio.Event()

    async def slowly(messages: Sequence[Outgoing], *, deadline_s: float) -> list[int]:
        bench.stream.publish_many = publish  # type: ignore[method-assign]
        sent.set()
        await arrives.wait()
        return await publish(messages, deadline_s=deadline_s)

    bench.stream.publish_many = slowly  # type: ignore[method-assign]
    older = asyncio.create_task(bench.partial.save([attempt]))
    await sent.wait()
    bench.engine.samples = {"r0": sample(5, 6)}
    newer = asyncio.create_task(bench.partial.save([attempt]))
    for _ in range(100):
        await asyncio.sleep(0)
    arrives.set()
    assert await older
    assert await newer
    assert bench.stored() == {0: sample(5, 6)}
    running.ended.set()
    await running.task


async def leave(bench: Bench, save_s: float) -> Running:
    """Start a group of 6 tokens, and let its worker leave while the stream is full; return the group."""
    running = Running(bench)
    await running.begin()
    bench.stream.error = StreamFull("stream PARTIAL is full")
    await bench.partial.hand_over(save_s)
    for place in range(SIZE):
        running.end(place, sample(5))
    running.ended.set()
    return running


async def test_a_leaving_worker_retries_a_failed_save(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    running = await leave(bench, 60.0)
    await until(lambda: "are not saved: stream PARTIAL is full" in caplog.text)
    bench.stream.error = None
    with pytest.raises(HandedOver, match="goes on with its 6 tokens"):
        await running.task
    assert len(bench.stored()) == SIZE


async def test_a_leaving_worker_reports_lost_tokens() -> None:
    bench = Bench()
    running = await leave(bench, 0.2)
    with pytest.raises(HandedOver, match="its 6 tokens are lost"):
        await asyncio.wait_for(running.task, 30)
    assert not bench.stream.data


async def test_a_group_that_ends_in_time_is_not_handed_over() -> None:
    bench = Bench()
    running = Running(bench)
    await running.begin()
    await bench.partial.hand_over()
    for place in range(SIZE):
        running.end(place, sample(5, finish="stop"))
    running.ended.set()
    await running.task
    assert not bench.stream.data
