"""Requests that cannot be served are refused with a reason that OpenAI's clients understand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.coordinator.training.journal import Journal
from penstock.shared.protocol.events import Checkpointed, JobStarted

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "agent", "prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("chat/completions", {**CHAT, "model": "gpt-4"}, 404, "model_not_found"),
        ("chat/completions", {**CHAT, "messages": []}, 422, "invalid_body"),
        ("chat/completions", {"model": "agent"}, 422, "invalid_body"),
        ("chat/completions", {**CHAT, "max_tokens": "10"}, 422, "invalid_body"),
        ("chat/completions", {**CHAT, "max_tokens": 4000}, 400, "context_length_exceeded"),
        ("chat/completions", {**CHAT, "n": 0}, 422, "invalid_body"),
        ("chat/completions", {**CHAT, "top_logprobs": 21, "logprobs": True}, 422, "invalid_body"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "invalid_schema"),
        ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "unsupported_parameter"),
        (
            "chat/completions",
            {**CHAT, "response_format": {"type": "json_object"}},
            400,
            "invalid_schema",
        ),  # no such words
        ("chat/completions", {**CHAT, "repetition_penalty": 1.5}, 400, "unsupported_parameter"),
        ("chat/completions", {**CHAT, "logit_bias": {"x": 1}}, 422, "invalid_body"),
        ("chat/completions", {**CHAT, "logit_bias": {"900": 1}}, 400, "invalid_prompt"),
        ("chat/completions", {**CHAT, "metadata": {"episode_id": "a b"}}, 422, "invalid_episode"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "invalid_prompt",
        ),
        ("completions", {**TEXT, "prompt": ""}, 422, "invalid_body"),
        ("completions", {**TEXT, "prompt": [[]]}, 400, "invalid_prompt"),
        ("completions", {**TEXT, "prompt": [4, 10_000]}, 400, "invalid_prompt"),
        ("completions", {**TEXT, "prompt": [4, -1]}, 422, "invalid_body"),
        ("completions", {**TEXT, "prompt": ["hi", "hi", "hi"], "n": 100}, 422, "invalid_body"),
        ("completions", {**TEXT, "temperature": 1e-39}, 422, "invalid_body"),
        ("completions", {**TEXT, "max_tokens": 0}, 400, "unsupported_parameter"),
        ("completions", {**TEXT, "best_of": 3}, 400, "unsupported_parameter"),
    ],
)
async def test_bad_requests(agent: Any, path: str, body: dict[str, Any], status: int, code: str) -> None:
    before = len(await agent.interactions())
    response = await agent.client.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert len(await agent.interactions()) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {**TEXT, "prompt": [-1] * 50_000}),
        ("chat/completions", {**CHAT, "messages": [{"role": ""}] * 30_000}),
        ("chat/completions", {**CHAT, "logit_bias": {f"x{i}": "y" for i in range(50_000)}}),
    ],
)
async def test_few_flaws_of_many_are_listed(agent: Any, path: str, body: dict[str, Any]) -> None:
    response = await agent.client.post(f"/v1/{path}", json=body)
    assert response.status_code == 422
    assert 1 <= len(response.json()["errors"]) <= 20


async def test_an_error_of_a_stream_comes_before_it(agent: Any) -> None:
    response = await agent.client.post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 9999})
    assert response.status_code == 400


async def test_models(agent: Any) -> None:
    listed = (await agent.client.get("/v1/models")).json()
    assert [(row["id"], row["job"], row["online"]) for row in listed["data"]] == [("agent", agent.job, True)]
    for path in ("/v1/models/agent", f"/v1/models/{agent.job}", "/e/x/v1/models/agent"):
        assert (await agent.client.get(path)).json() == listed["data"][0]
    assert (await agent.client.get("/e/x/v1/models")).json() == listed
    assert (await agent.client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_a_model_is_promoted_and_rolled_back_by_its_name(agent: Any) -> None:
    journal = Journal(agent.bus, agent.job)
    await journal.load()
    await journal.append([JobStarted(writer_epoch=1, time=0.0, config_digest="c")])
    checkpoint = Checkpointed(
        writer_epoch=1, time=5.0, number=0, version=0, digest="w", path="/gone", trainer_epoch=1, low_seq=0
    )
    await journal.append([checkpoint])
    row = {"number": 0, "time": 5.0, "available": False}
    assert (await agent.client.get("/v1/models/agent/versions")).json()["data"] == [
        {"version": 0, "served": True, "newest": True, "checkpoint": row}
    ]
    assert (await agent.client.get("/v1/models/other/versions")).status_code == 404

    async def ask(verb: str, version: int, model: str = "agent") -> Any:
        return await agent.client.post(f"/v1/models/{model}/{verb}", json={"version": version})

    promoted, back = await ask("promote", 3), await ask("rollback", 0)
    assert [(reply.status_code, reply.json()["kind"], reply.json()["args"]) for reply in (promoted, back)] == [
        (202, "promote", {"version": 3}),
        (202, "rollback", {"checkpoint": 0}),
    ]
    assert (await agent.client.get(back.headers["location"])).json()["id"] == back.json()["id"]
    missing = await ask("rollback", 9)
    assert (missing.status_code, "there are: 0" in missing.json()["detail"]) == (404, True)
    for verb in ("promote", "rollback"):
        assert (await ask(verb, 0, "other")).json()["error"]["code"] == "model_not_found"
