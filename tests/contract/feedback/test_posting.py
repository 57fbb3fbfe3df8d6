"""Posting feedback: which requests are accepted, which job gets them, and the errors of the others."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

import pytest

from penstock.services.coordinator.api.guard import MAX_LARGE_BYTES
from penstock.services.coordinator.feedback import ingest
from penstock.services.coordinator.feedback.posts import MAX_TOKENS
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.protocol.live.interaction import new_marked_id

TARGET = "0192f0c1-0000-7000-8000-000000000001"
EPISODE = "0192f0c1-0000-7000-8000-00000000000e"
NDJSON = {"content-type": "application/x-ndjson"}


def refused(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    assert body["error"]["code"] == code, body
    return body


async def test_a_verdict_is_durable_and_has_a_status(live: Any) -> None:
    target = live.new_id()
    reply = await live.post({"inference_id": f"chatcmpl-{target}", "metric_name": "accepted", "value": True})
    assert reply.status_code == 202, reply.text
    body = reply.json()
    assert body == {
        "feedback_id": body["feedback_id"], "status": "accepted", "duplicate": False, "target": "unknown_yet",
        "job": live.job, "stream_seq": 1, "href": f"/v1/feedback/{body['feedback_id']}",
    }  # fmt: skip
    (item,) = await live.items()
    assert (item.id, item.inference, item.metric, item.value) == (body["feedback_id"], target, "accepted", True)
    found = await live.status_of(body["feedback_id"])
    assert (found["status"], found["job"], found["metric"]) == ("received", live.job, "accepted")


async def test_requests_of_one_moment_share_a_message(live: Any) -> None:
    await live.accept()
    replies = await asyncio.gather(*(live.accept() for _ in range(40)))
    batches = await live.stored()
    assert len({reply["feedback_id"] for reply in replies}) == 40
    assert sum(map(len, batches)) == 41
    assert len(batches) < 20


async def test_requests_of_tensorzeros_client_are_accepted(live: Any) -> None:
    """Post the body of TensorZero's Python client to the path that it uses; ids are bare UUIDs."""
    body = {
        "episode_id": None, "inference_id": live.new_id(), "metric_name": "score", "value": 1, "internal": False,
        "tags": {"user_id": "u1", "page": "7"}, "dryrun": None,
    }  # fmt: skip
    reply = await live.client.post("/feedback", json=body)
    assert reply.status_code == 202, reply.text
    assert str(uuid.UUID(reply.json()["feedback_id"])) == reply.json()["feedback_id"]
    (item,) = await live.items()
    assert item.value == 1.0
    assert item.tags["page"] == "7"
    assert item.user == item.tags["user_id"] == live.service.pseudonyms.of("u1") != "u1"
    dry = await live.client.post("/feedback", json={**body, "dryrun": True})
    assert (dry.status_code, dry.json()["status"]) == (200, "valid")
    assert len(await live.items()) == 1


async def test_every_kind_is_stored_as_what_it_is(live: Any) -> None:
    a, b, episode = live.new_id(), live.new_id(), live.new_id()
    posts = [
        {"episode_id": f"ep_{episode}", "metric_name": "solved", "value": False, "final": True},
        {"episode_id": episode, "metric_name": "score", "value": 0.5, "turn": 2, "weight": 0.5, "comment": "meh"},
        {"inference_id": a, "metric_name": "reward", "value": -1},
        {"inference_id": a, "metric_name": "comment", "value": "nice"},
        {"inference_id": a, "metric_name": "demonstration", "value": {"role": "assistant", "content": "so"}},
        {"kind": "preference", "chosen": f"chatcmpl-{a}", "rejected": b, "strength": 0.5},
        {"kind": "correction", "inference_id": a, "corrected": {"role": "assistant", "content": "thus"}},
        {
            "kind": "interaction", "model": "policy@3", "policy_version": 3, "messages": [{"role": "user"}],
            "prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -0.5], "reward": 0.7, "user": "u",
            "observed_at": "2026-01-02T03:04:05Z", "rewards": {"score": 1}, "episode_id": f"ep_{episode}", "turn": 3,
        },
        {
            "kind": "preference", "model": "policy", "messages": [{"role": "user", "content": "1+1"}], "chosen": "2",
            "rejected": {"role": "assistant", "content": "3"}, "user": "u",
        },
    ]  # fmt: skip
    reply = await live.client.post("/v1/feedback/batch", json=posts)
    assert reply.status_code == 207
    assert reply.json()["accepted"] == len(posts), reply.text
    items = await live.items()
    assert [item.id for item in items] == [row["id"] for row in reply.json()["data"]]
    kinds = ["metric"] * 5 + ["preference", "correction", "interaction", "preference"]
    assert [item.kind for item in items] == kinds
    solved, score, reward, comment, demonstration, preference, correction, whole, texts = items
    assert (solved.episode, solved.value, solved.final) == (episode, False, True)
    assert (score.episode, score.turn, score.weight, score.body) == (episode, 2, 0.5, {"comment": "meh"})
    assert (reward.inference, reward.value) == (a, -1.0)
    assert comment.value == "nice"
    assert demonstration.body["demonstration"]["content"] == "so"
    assert preference.body == {"chosen": a, "rejected": b, "strength": 0.5}
    assert correction.body["corrected"]["content"] == "thus"
    assert (whole.episode, whole.turn, whole.user) == (episode, 3, live.service.pseudonyms.of("u"))
    assert whole.body["token_ids"] == [2, 3]
    assert whole.body["observed_at"] == 1767323045.0
    assert not {"user", "tags", "kind"} & set(whole.body)
    answers = [{"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}]
    assert (texts.inference, texts.body.pop("answers"), texts.user) == ("", answers, whole.user)
    assert texts.body == {"model": "policy", "messages": [{"role": "user", "content": "1+1"}], "strength": 1.0}


@pytest.mark.parametrize(
    ("about", "last"),
    [
        ({}, True),
        ({"episode_id": EPISODE}, False),
        ({"episode_id": EPISODE, "turn": 0, "done": False}, False),
        ({"episode_id": EPISODE, "turn": 3, "done": True}, True),
    ],
)
async def test_a_turn_of_an_episode_ends_it_only_if_done(live: Any, about: dict[str, Any], last: bool) -> None:
    whole = {"kind": "interaction", "model": "policy", "prompt_token_ids": [1], "token_ids": [2], **about}
    assert (await live.post(whole)).status_code == 202
    assert [item.final for item in await live.items()] == [last]


PAIR = {"kind": "preference", "model": "policy", "prompt_token_ids": [1], "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"rejected": "a"}, "/rejected", "preferred to itself"),
        ({"messages": [{"role": "user"}]}, "", "needs a prompt"),
        ({"prompt_token_ids": None}, "", "needs a prompt"),
        ({"chosen": 7}, "/chosen", "valid"),
        ({"rejected": ""}, "/rejected", "at least 1"),
        ({"strength": 0}, "/strength", "greater than 0"),
        ({"model": "unknown"}, "/model", "no online job"),
    ],
)
async def test_a_preference_between_texts_needs_a_job_a_prompt_and_two_answers(
    live: Any, change: dict[str, Any], pointer: str, words: str
) -> None:
    reply = await live.client.post("/v1/feedback", json={**PAIR, **change})
    problem = refused(reply, 422, "no_such_target" if "model" in change else "invalid_feedback")
    assert any(flaw["pointer"].startswith(pointer) for flaw in problem["errors"]), problem
    assert words in problem["detail"], problem
    assert await live.items() == []


FLAWS: list[tuple[dict[str, Any], str, str]] = [
    ({"metric_name": "liked"}, "/metric_name", "declares no metric 'liked'; it takes: accepted, comment"),
    ({"value": 1}, "/value", "a boolean"),
    ({"value": "yes"}, "/value", "a boolean"),
    ({"metric_name": "score", "value": True}, "/value", "a finite number"),
    ({"metric_name": "score", "value": 10.5}, "/value", "within ±10"),
    ({"metric_name": "comment", "value": True}, "/value", "a string"),
    ({"metric_name": "demonstration", "value": 1}, "/value", "a string or a message"),
    ({"metric_name": "solved"}, "/episode_id", "episode_id"),
    ({"weight": 2}, "/weight", "less than or equal to 1"),
    ({"final": 0}, "/final", "valid boolean"),
    ({"value": None}, "/value", "valid"),
    ({"inference_id": "chat-7"}, "/inference_id", "pattern"),
    ({"inference_id": None}, "/inference_id", "valid string"),
    ({"episode_id": TARGET}, "/episode_id", "null"),
    ({"reward": 1.0}, "/reward", "not permitted"),
    ({"tags": {"a": 1}}, "/tags/a", "valid string"),
    ({"tags": {str(i): "" for i in range(17)}}, "/tags", "at most 16"),
    ({"tags": {"a": "x" * 513}}, "/tags/a", "at most 512"),
    ({"comment": "x" * 8193}, "/comment", "at most 8192"),
    ({"observed_at": 7}, "/observed_at", "datetime"),
    ({"observed_at": "2026-01-02T03:04:05"}, "/observed_at", "timezone"),
    ({"feedback_id": "seven"}, "/feedback_id", "pattern"),
    ({"kind": "praise"}, "", "kind must be interaction, preference or correction"),
]


async def test_flaws_are_named(live: Any) -> None:
    for change, pointer, words in FLAWS:
        body = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True, **change}
        problem = refused(await live.post(body), 422, "invalid_feedback")
        assert any(flaw["pointer"].startswith(pointer) for flaw in problem["errors"]), problem
        assert words in problem["detail"], problem
    assert await live.items() == []


async def test_invalid_numbers_and_invalid_json_are_refused(live: Any) -> None:
    body = '{"inference_id": "%s", "metric_name": "score", "value": %s}'
    headers = {"content-type": "application/json"}
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = body % (live.new_id(), text)
        refused(await live.client.post("/v1/feedback", content=content, headers=headers), 422, "invalid_feedback")
        reply = await live.client.post("/v1/feedback/batch", content=f"[{content}]", headers=headers)
        assert [row["status"] for row in reply.json()["data"]] == [422]
    for content, status, code in ((b"{", 400, "malformed_json"), (b'"\xff"', 400, "malformed_json")):
        refused(await live.client.post("/v1/feedback", content=content, headers=headers), status, code)
    refused(await live.client.post("/v1/feedback", content=b"{}"), 415, "unsupported_media_type")
    assert await live.items() == []


@pytest.mark.parametrize(("integer", "status"), [(1 << 64, 422), (-(1 << 63) - 1, 422), ((1 << 64) - 1, 202)])
async def test_integers_that_cannot_be_stored_are_refused(live: Any, integer: int, status: int) -> None:
    message = {"role": "assistant", "tool_calls": [{"arguments": {"a": [integer]}}]}
    correction = {"kind": "correction", "inference_id": live.new_id(), "corrected": message}
    assert (await live.post(correction)).status_code == status
    verdict = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True}
    reply = await live.client.post("/v1/feedback/batch", json=[correction, verdict])
    assert [row["status"] for row in reply.json()["data"]] == [status, 202], "each item is judged alone"


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": [-1.0]}, "1 values for 2 token_ids"),
    ({"logprobs": [-1.0, 0.1]}, "above 0"),
    ({"token_ids": [], "logprobs": []}, "at least 1"),
    ({"prompt_token_ids": None}, "prompt_token_ids"),
    ({"token_ids": None, "logprobs": None}, "needs a completion"),
    ({"prompt_token_ids": [1] * MAX_TOKENS}, f"more than {MAX_TOKENS} tokens"),
    ({"rewards": {"liked": 1.0}}, "declares no metric 'liked'"),
    ({"model": "nobody"}, "no online job 'nobody'"),
    ({"model": None}, "/model"),
]


async def test_inconsistent_interactions_are_refused(live: Any) -> None:
    whole = {"kind": "interaction", "model": "policy", "prompt_token_ids": [1], "token_ids": [2, 3]}
    for change, words in MISFITS:
        reply = await live.post({**whole, "logprobs": [-1, -0.5], **change})
        assert reply.status_code == 422
        assert words in reply.json()["detail"], reply.text
    assert await live.items() == []


VERDICTS: list[tuple[dict[str, Any], str, str]] = [
    ({"rewards": {"accepted": 1.0}}, "/rewards/accepted", "'accepted' is a boolean, found a number"),
    ({"rewards": {"solved": 1}}, "/rewards/solved", "'solved' is a boolean, found a number"),
    ({"rewards": {"score": True}}, "/rewards/score", "'score' is a finite number, found a boolean"),
    ({"rewards": {"score": 10.5}}, "/rewards/score", "within ±10"),
    ({"rewards": {"accepted": "yes"}}, "/rewards/accepted", "valid boolean"),
    ({"rewards": {"reward": True}}, "/rewards/reward", "'reward' is a finite number, found a boolean"),
    ({"reward": True}, "/reward", "'reward' is a finite number, found a boolean"),
    ({"reward": 11.0}, "/reward", "within ±10"),
]


async def test_rewards_of_an_interaction_have_the_types_of_their_metrics(live: Any) -> None:
    whole = {"kind": "interaction", "model": "policy", "prompt_token_ids": [1], "token_ids": [2, 3]}
    for change, pointer, words in VERDICTS:
        problem = refused(await live.post(whole | change), 422, "invalid_feedback")
        assert problem["errors"][0]["pointer"].startswith(pointer), problem
        assert words in problem["detail"], problem
    assert await live.items() == []
    rewards = {"accepted": True, "solved": False, "score": 1}
    assert (await live.post(whole | {"rewards": rewards, "reward": -1})).status_code == 202
    (item,) = await live.items()
    assert (item.body["rewards"], item.body["reward"]) == ({"accepted": True, "solved": False, "score": 1.0}, -1.0)
    assert [type(item.body["rewards"][name]) for name in rewards] == [bool, bool, float]


async def test_the_job_is_found_by_id_by_name_or_as_the_only_one(live: Any) -> None:
    assert (await live.accept(inference_id=TARGET))["job"] == live.job
    other = await live.store.create(parse_job({**(await live.store.get(live.job)).spec, "name": "second"}))
    live.service.jobs.know((await live.store.index()).get(other.id))
    problem = refused(
        await live.post({"inference_id": TARGET, "metric_name": "accepted", "value": True}), 422, "no_such_target"
    )
    assert "GET /v1/models" in problem["detail"]
    assert "second" not in problem["detail"], "it may be a job that the key does not reach"
    assert (await live.accept())["job"] == live.job
    whole = {"kind": "interaction", "model": "second", "completion": {"content": "x"}}
    assert (await live.post(whole)).json()["job"] == other.id
    await live.store.set_status(other.id, phase="succeeded")
    live.service.jobs.know((await live.store.index()).get(other.id))
    refused(await live.post({**whole, "model": other.id}), 410, "job_finished")


@pytest.mark.parametrize("is_followed", [True, False])
async def test_feedback_on_a_job_of_another_kind_is_refused(live: Any, is_followed: bool) -> None:
    spec = {
        "kind": "rl", "name": "fixed", "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}}, "train": {"batch_size": 8, "max_updates": 1},
        "reward": {"scorers": [{"type": "exact"}]},
    }  # fmt: skip
    other = await live.store.create(parse_job(spec))
    if is_followed:
        live.service.jobs.know((await live.store.index()).get(other.id))
    id = new_marked_id(other.id)
    for target in ({"inference_id": id}, {"episode_id": f"ep_{id}", "turn": 0}):
        body = {**target, "metric_name": "accepted", "value": True}
        problem = refused(await live.post(body), 422, "not_online")
        assert f"'fixed' ({other.id})" in problem["detail"]
        assert "of kind rl" in problem["detail"]
        assert problem["errors"][0]["pointer"] == f"/{next(iter(target))}"
    whole = {"kind": "interaction", "model": "fixed", "completion": {"content": "x"}}
    assert refused(await live.post(whole), 422, "not_online")["errors"][0]["pointer"] == "/model"
    assert await live.items() == []


async def test_a_batch_judges_each_item_alone(live: Any) -> None:
    good = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True}
    lines = [json.dumps(good), "{", json.dumps({**good, "value": 3}), "", json.dumps({**good, "value": False})]
    reply = await live.client.post("/v1/feedback/batch", content="\n".join(lines), headers=NDJSON)
    assert reply.status_code == 207
    body = reply.json()
    assert [(row["index"], row["status"]) for row in body["data"]] == [(0, 202), (1, 400), (2, 422), (3, 202)]
    assert (body["accepted"], body["refused"]) == (2, 2)
    assert body["data"][2]["problem"]["errors"][0]["pointer"] == "/value"
    assert [item.value for item in await live.items()] == [True, False]
    for content, status in ((b"[]", 422), (b"{}", 422), (b"[", 400), (json.dumps([good] * 257), 413)):
        reply = await live.client.post(
            "/v1/feedback/batch", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == status, reply.text


async def test_large_bodies(live: Any) -> None:
    """A body may have 8 MiB, an item other than an interaction 1 MiB; an interaction may take several messages."""
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 32 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)

    reply = await live.client.post("/v1/feedback", content=endless(), headers={"content-type": "application/json"})
    refused(reply, 413, "too_large")
    assert reply.json()["max_bytes"] == MAX_LARGE_BYTES
    assert sent <= MAX_LARGE_BYTES + (1 << 17)
    long = {"inference_id": live.new_id(), "metric_name": "demonstration", "value": {"content": "x" * (1 << 20)}}
    refused(await live.post(long), 413, "too_large")
    for beside in ([], [{**long, "value": 3}]):  # which has a flaw of its own
        batch = await live.client.post("/v1/feedback/batch", json=[long, *beside])
        row = batch.json()["data"][0]
        assert (row["status"], row["problem"]["max_bytes"]) == (413, 1 << 20), "in a batch, too"
    whole = {"kind": "interaction", "model": "policy", "completion": {"content": "y" * (3 << 20)}}
    reply = await live.post(whole)
    assert reply.status_code == 202, reply.text
    assert reply.json()["stream_seq"] is None
    (item,) = await live.items()
    assert item.body["completion"] == whole["completion"]
    assert (await live.status_of(item.id))["kind"] == "interaction"
    await live.accept()
    assert len(await live.items()) == 2


@pytest.mark.long
async def test_a_full_stream_asks_the_client_to_retry(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"kind": "interaction", "model": "policy", "completion": {"content": "z" * (7 << 20)}}
    codes = []
    for _ in range(4):
        reply = await live.post(big)
        codes.append(reply.status_code)
    assert codes == [202, 202, 503, 503]
    problem = refused(reply, 503, "ingest_backlog_full")
    assert reply.headers["retry-after"] == "1"
    assert reply.headers["retry-after-ms"] == "1000"
    assert "full" in problem["detail"]


async def test_feedback_ahead_of_the_index_waits_before_it_is_refused(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True}
    monkeypatch.setattr(ingest, "MAX_UNPROJECTED", 2)
    monkeypatch.setattr(ingest, "ROOM_S", 30.0)
    replies = await asyncio.gather(*(live.post(item) for _ in range(20)))
    assert [reply.status_code for reply in replies] == [202] * 20, "ten times what the index may be behind"
    monkeypatch.setattr(ingest, "MAX_UNPROJECTED", 0)
    monkeypatch.setattr(ingest, "ROOM_S", 0.2)
    began = time.monotonic()
    assert "wait to be indexed" in refused(await live.post(item), 503, "ingest_backlog_full")["detail"]
    assert time.monotonic() - began > 0.2
    monkeypatch.setattr(ingest, "MAX_QUEUED", 0)
    monkeypatch.setattr(ingest, "ROOM_S", 60.0)
    began = time.monotonic()
    refused(await live.post(item), 503, "ingest_backlog_full")
    assert time.monotonic() - began < 30, "too much waits already"
    assert len(await live.items()) == 20
