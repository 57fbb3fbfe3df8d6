"""Corrections, preferences and posted answers over the API: trained once, reported, audited, and replayed bitwise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

API_KEY = "e2e-key"
LIVE: dict[str, Any] = {
    "kind": "online_rl",
    "name": "corrected",
    "sampling": {"max_new_tokens": 6},
    "optimizer": {"learning_rate": 0.003},
    "train": {"batch_size": 4, "max_lag": 4, "max_updates": 9},
    "algorithm": {"type": "reinforce_pp", "baseline": {}},
    "online": {
        "metrics": {"liked": {"type": "boolean"}, "score": {"type": "float", "default_after_s": 0.1}},
        "max_wait_s": 2,
        "off_policy": {"supervised": {"coef": 1.0}, "preference": {"coef": 1.0}, "max_share": 1.0},
        "posted": {"trusted_keys": ["*"], "audit_share": 1.0, "held_versions": 3},
    },
}


class Agent:
    """Client of one job that asks, posts feedback, and posts better answers."""

    def __init__(self, stack: Any, job: str) -> None:
        self.http = httpx.Client(base_url=stack.stack.url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60)
        self.job = job

    def ask(self, number: int) -> list[dict[str, Any]]:
        """Ask for two answers to one prompt, in two requests: further choices of one request have ids of their own."""
        body = {"model": self.job, "prompt": f"{number}+1=", "n": 1, "return_token_ids": True}
        replies = [self.http.post("/v1/completions", json=body) for _ in range(2)]
        assert all(reply.is_success for reply in replies), [reply.text for reply in replies]
        return [reply.json() for reply in replies]

    def post(self, **body: Any) -> str:
        reply = self.http.post("/v1/feedback", json=body)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["feedback_id"])

    def judge(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        """Post a positive and a negative judgement: a single answer would wait for another one to be compared with."""
        self.post(inference_id=first["id"], metric_name="liked", value=True)
        self.post(inference_id=second["id"], metric_name="liked", value=False)

    def status_of(self, feedback: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/feedback/{feedback}").json())


@pytest.mark.long
def test_a_job_learns_from_corrections_preferences_and_posted_answers(
    stack: Any, make_job: Any, request: pytest.FixtureRequest
) -> None:
    sections = {**make_job(), **LIVE}
    job = stack.client.submit({name: value for name, value in sections.items() if name not in ("data", "reward")}).id
    stack.until(lambda: stack.status(job).phase == "running", "the job to run", 60, lambda: stack.client.why(job))
    agent = Agent(stack, job)
    request.addfinalizer(agent.http.close)
    stack.until(
        lambda: agent.http.post("/v1/completions", json={"model": job, "prompt": "1+1="}).is_success, "an answer"
    )
    reasons: dict[str, str] = {}
    for number in range(4):
        first, second = agent.ask(number)
        content = {"role": "assistant", "content": str(number + 1)}
        reasons[agent.post(kind="correction", inference_id=first["id"], corrected=content)] = "supervised: correction"
        reasons[agent.post(kind="preference", chosen=first["id"], rejected=second["id"])] = "preference: preference"
        reasons[agent.post(inference_id=first["id"], metric_name="liked", value=number % 2 == 0)] = "feedback"
    statuses = {}

    def all_are_trained() -> bool:
        statuses.update({name: agent.status_of(name) for name in reasons})
        return all(status["status"] == "trained" for status in statuses.values())

    stack.until(all_are_trained, "everything to be trained", 90, lambda: (statuses, stack.client.why(job)))
    assert {name: status["reason"] for name, status in statuses.items()} == reasons
    posted = agent.post(
        kind="interaction", model=job, messages=[{"role": "user", "content": "2+2="}],
        completion={"role": "assistant", "content": "4"}, rewards={},
    )  # fmt: skip
    stack.until(lambda: agent.status_of(posted)["status"] == "rejected", "a text without reward to be rejected")
    assert agent.status_of(posted)["reason"] == "text_only"
    check_rescored(stack, job, agent)
    check_episode(stack, job, agent)
    stack.client.cancel(job)
    assert stack.finish(job).status.phase == "cancelled"
    stack.check_audit(job)
    stack.check_replay(job, at_least=1)


def check_rescored(stack: Any, job: str, agent: Agent) -> None:
    """Check that missing log-probs of a posted answer are computed, although its version is no longer served."""
    early, other = agent.ask(7)
    record = agent.http.get(f"/v1/interactions/{early['id'].removeprefix('cmpl-')}").json()
    (span,) = record["spans"]
    step = stack.status(job).step
    agent.judge(early, other)
    stack.reach(job, step + 1)
    posted = agent.post(
        kind="interaction", model=job, prompt_token_ids=record["prompt_ids"], token_ids=record["token_ids"],
        policy_version=span[0], rewards={"score": -1.0},
    )  # fmt: skip
    agent.judge(*agent.ask(8))
    stack.until(lambda: agent.status_of(posted)["status"] == "trained", "an old answer to be trained", 60)
    status = agent.status_of(posted)
    assert status["reason"] == "rescored", status
    text = [*record["prompt_ids"], *record["token_ids"]]  # other prompts have answers of the same tokens, too
    groups = stack.groups(job).values()
    group = max((one for one in groups if [*one.prompt_ids, *one.token_ids] == text), key=lambda one: one.draw)
    assert group.spans[:, 1].tolist() == [span[0]]
    assert group.logprobs.tolist() == pytest.approx(record["logprobs"], abs=1e-5)


def check_episode(stack: Any, job: str, agent: Agent) -> None:
    """Check that two posted turns of an episode, the last one first, become one trajectory with the posted reward."""
    answer, other = agent.ask(5)
    record = agent.http.get(f"/v1/interactions/{answer['id'].removeprefix('cmpl-')}").json()
    prompt, tokens, version = record["prompt_ids"], record["token_ids"], record["spans"][0][0]
    turn = {
        "kind": "interaction", "model": job, "episode_id": record["episode"], "token_ids": tokens,
        "policy_version": version, "prompt_token_ids": prompt,
    }  # fmt: skip
    last = agent.post(
        **turn | {"turn": 1, "prompt_token_ids": [*prompt, *tokens, prompt[0]]}, rewards={"score": 0.5}, done=True
    )
    first = agent.post(**turn, turn=0)
    agent.judge(answer, other)
    names = [first, last]
    stack.until(lambda: all(agent.status_of(name)["status"] == "trained" for name in names), "turns to be trained", 60)
    assert [agent.status_of(name)["reason"] for name in names] == ["rescored"] * 2
    whole = [*tokens, prompt[0], *tokens]
    (merged,) = [group for group in stack.groups(job).values() if group.token_ids.tolist() == whole]
    assert (merged.mask == 0).sum() == 1
    assert merged.rewards.tolist() == [0.5]
