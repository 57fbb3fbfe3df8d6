"""Jobs are paused, resumed and cancelled; evaluations measure exactly the version that they name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
import torch

from penstock.services.trainer.checkpoint.state import load_checkpoint
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import PromptSource
from penstock.shared.models.loading import build_tokenizer, stop_token_ids
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Checkpointed, Event

T = TypeVar("T", bound=Event)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_job_is_paused_resumed_and_cancelled(stack: Any) -> None:
    job = stack.submit("train.max_updates=1000", "checkpoint.every=1000")
    stack.reach(job, 5)
    end = stack.until(lambda: stack.status(job).expected_end, "an expected end, which takes two reported steps")
    assert end > datetime.now(UTC), "of a thousand updates"
    stack.client.pause(job)
    assert stack.client.wait(job, goal="paused", timeout_s=20).status.phase == "paused"
    paused = stack.status(job)
    assert paused.expected_end is None
    events = stack.ledger(job)
    last = [newest(events, kind).number for kind in (BatchSealed, BatchTrained, Checkpointed)]
    assert last == [paused.step] * 3, "a step boundary, and durable"
    assert (stack.data_dir / newest(events, Checkpointed).path / "COMMIT").exists()
    time.sleep(1.0)
    assert stack.status(job).step == paused.step
    assert stack.ledger(job) == events

    stack.client.resume(job)
    stack.reach(job, paused.step + 5)
    stack.client.cancel(job)
    end = stack.finish(job, 20).status
    events = stack.ledger(job)
    assert end.phase == "cancelled"
    assert newest(events, Checkpointed).number == newest(events, BatchTrained).number == end.step, "nothing is undone"
    assert newest(events, BatchSealed).number == end.step, "what was sealed was trained"
    check_dropped(stack, job)


@pytest.mark.long
def test_a_forced_cancel_does_not_wait(stack: Any) -> None:
    job = stack.submit("train.max_updates=1000", "checkpoint.every=1000")
    stack.reach(job, 3)
    stack.client.cancel(job, force=True)
    end = stack.finish(job, 20).status
    assert end.phase == "cancelled"
    assert newest(stack.ledger(job), Checkpointed).number == 0
    assert check_dropped(stack, job) > 0


def newest(events: list[Event], kind: type[T]) -> T:
    """Return the last event of a kind."""
    return next(event for event in reversed(events) if isinstance(event, kind))


def check_dropped(stack: Any, job: str) -> int:
    """Check that every draw that was not trained is dropped as `cancelled`; return their number."""
    draws = stack.status(job).draws
    assert draws["in_flight"] == 0
    num_dropped = draws["drawn"] - draws["trained"]
    assert draws["dropped"] == ({"cancelled": num_dropped} if num_dropped else {})
    stack.check_audit(job)
    return int(num_dropped)


def greedy_score(model: Any, config: JobConfig, score: Callable[..., float]) -> float:
    """Return the mean score of a transformers model's greedy answers: one prompt at a time, without a cache."""
    tokenizer = build_tokenizer(config.model)
    source, stops = PromptSource(config.data, tokenizer, config.seed), stop_token_ids(tokenizer, None)
    scores = []
    for index in range(config.evaluation.num_prompts):
        prompt = source.eval(index)
        ids = list(prompt.token_ids)
        while len(ids) < len(prompt.token_ids) + config.sampling.max_new_tokens:
            with torch.no_grad():
                token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            if token in stops:
                break
            ids.append(token)
        completion = tokenizer.decode(ids[len(prompt.token_ids) :], skip_special_tokens=False)
        scores.append(score(prompt.text, completion, prompt.answer, prompt.row))
    return sum(scores) / len(scores)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, as the trainer of the small job does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_an_evaluation_measures_the_version_that_it_names(stack: Any, user_code: Any) -> None:
    """The test trains the log again and scores greedy answers of each version that was evaluated."""
    every, total = 4, 12
    for seed in range(4):  # if greedy answers stayed the same, any version would pass
        job = stack.submit(
            f"train.max_updates={total}", "checkpoint.every=1000", "optimizer.learning_rate=5e-2", "train.max_lag=0",
            "data.eval={type: addition, digits: 1}", f"evaluation={{every: {every}, num_prompts: 16}}", f"seed={seed}",
            reward={"scorers": [{"type": "function", "path": "e2e_scorers:fingerprint"}]},
        )  # fmt: skip
        record = stack.finish(job)
        assert record.status.step == total
        stack.check_audit(job)
        columns = stack.client.metrics(job, names="eval/greedy")
        pairs = zip(columns["steps"], columns["series"]["eval/greedy"], strict=True)
        measured = {step: value for step, value in pairs if value is not None}
        if len({round(value, 6) for value in measured.values()}) > 1:
            break
    else:
        pytest.fail("with no seed did versions give different answers")

    config, events, groups = JobConfig.parse(record.spec), stack.ledger(job), stack.groups(job)
    learner = Learner(config)
    initial = next(event for event in events if isinstance(event, Checkpointed))
    learner.load_state(load_checkpoint(stack.data_dir / initial.path).state)
    expected = {0: greedy_score(learner.model, config, user_code.fingerprint)}
    for batch in (event for event in events if isinstance(event, BatchSealed)):
        shard = BatchShard.whole([groups[group.seq] for group in batch.groups])
        learner.update(shard, update_index=batch.update_index)
        if batch.number % every == 0:
            expected[batch.number] = greedy_score(learner.model, config, user_code.fingerprint)
    assert measured == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_a_cancel_without_a_checkpoint_drains_only(stack: Any) -> None:
    job = stack.submit("train.max_updates=100000", "checkpoint.every=100000", "limits.byte_budget=16777216")
    stack.reach(job, 2)
    stack.client.cancel(job, checkpoint=False)
    record = stack.finish(job)
    assert (record.status.phase, record.last_checkpoint) == ("cancelled", False)
    assert [row["number"] for row in stack.client.checkpoints(job)] == [0]
    assert record.status.step >= 2
    stack.check_audit(job)
