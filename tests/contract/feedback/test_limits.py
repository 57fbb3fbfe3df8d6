"""The API enforces the limits of feedback that `/v1/limits` shows: it accepts the limit and nothing above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HELD: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
    ("max_tags", lambda count: {"tags": {str(n): "x" for n in range(count)}}),
    ("max_tag_key", lambda count: {"tags": {"k" * count: "x"}}),
    ("max_tag_value", lambda count: {"tags": {"k": "x" * count}}),
    ("max_comment", lambda count: {"comment": "x" * count}),
    ("max_comment", lambda count: {"metric_name": "comment", "value": "x" * count}),
    ("max_text", lambda count: {"metric_name": "demonstration", "value": "x" * count}),
]


async def test_what_an_item_may_hold(live: Any) -> None:
    limits = (await live.client.get("/v1/limits")).json()["feedback"]
    item = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True, "dryrun": True}
    for limit, held in HELD:
        for count, status in ((limits[limit], 200), (limits[limit] + 1, 422)):
            reply = await live.post({**item, **held(count)})
            assert reply.status_code == status, (limit, reply.text)


async def test_how_many_turns_an_episode_may_have(live: Any) -> None:
    most = (await live.client.get("/v1/limits")).json()["feedback"]["max_episode_turns"]
    whole = {"kind": "interaction", "model": "policy", "prompt_token_ids": [1], "token_ids": [2]}
    for turn, status in ((most - 1, 202), (most, 422)):
        reply = await live.post({**whole, "episode_id": live.new_id(), "turn": turn})
        assert reply.status_code == status, reply.text
    assert reply.json()["errors"][0]["pointer"] == "/turn"


async def test_how_long_bodies_may_be(live: Any) -> None:
    limits = (await live.client.get("/v1/limits")).json()["feedback"]
    item = {"inference_id": live.new_id(), "metric_name": "accepted", "value": True}
    whole = {"kind": "interaction", "model": "policy", "prompt_token_ids": [1]}
    batches = "/v1/feedback/batch"
    for path, body, most in (
        ("/v1/feedback", item, limits["max_item_bytes"]),
        ("/v1/feedback", {**whole, "completion": {"content": "a"}}, limits["max_interaction_bytes"]),
        (batches, [item], limits["max_batch_bytes"]),
    ):
        data = live.client.build_request("POST", path, json=body).content
        for size, refused in ((most, False), (most + 1, True)):
            padded = data[:-1] + b" " * (size - len(data)) + data[-1:]
            reply = await live.client.post(path, content=padded, headers={"content-type": "application/json"})
            assert (reply.status_code == 413) is refused, (path, size, reply.text)
            assert reply.json().get("max_bytes") == (most if refused else None)
    for count, status in ((limits["max_batch_items"], 207), (limits["max_batch_items"] + 1, 413)):
        assert (await live.client.post(batches, json=[{**item, "dryrun": True}] * count)).status_code == status
    for count, status in ((limits["max_interaction_tokens"] - 1, 200), (limits["max_interaction_tokens"], 422)):
        reply = await live.post({**whole, "token_ids": [1] * count, "logprobs": [-1.0] * count, "policy_version": 0})
        assert (reply.status_code == 422) is (status == 422), reply.text


async def test_how_long_a_token_lives(open_live: Any) -> None:
    async with open_live(api_keys="root") as live:
        root = {"authorization": "Bearer root"}
        limits = (await live.client.get("/v1/limits", headers=root)).json()["feedback"]
        body = {"metric_name": "accepted", "inference_id": live.new_id()}
        shortest, longest = limits["token_min_s"], limits["token_max_s"]
        for life, status in ((shortest, 201), (shortest / 2, 422), (longest, 201), (longest + 1, 422)):
            wanted = {**body, "expires_in_s": life}
            reply = await live.client.post("/v1/feedback/tokens", json=wanted, headers=root)
            assert reply.status_code == status, reply.text
