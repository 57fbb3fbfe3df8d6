"""The `metadata` of requests: valid values are recorded, and invalid ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = {f"k{n:02}": "v" for n in range(16)}


@pytest.mark.parametrize(
    ("metadata", "split", "untrainable", "tags"),
    [
        ({"split": "val"}, "val", "", {}),
        ({"split": "train", "train": True}, "train", "", {}),
        ({"split": None, "train": None, "episode_id": None, "user_id": None}, "train", "", {}),
        ({"train": False}, "train", "train_false", {}),
        ({"train": "false"}, "train", "train_false", {}),
        ({"train": "False"}, "train", "train_false", {}),
        ({"train": "true"}, "train", "", {}),
        ({"a": 7, "b": 0.5, "c": True, "d": "é"}, "train", "", None),
        ({**MANY, "split": "val", "train": True, "episode_id": "meta"}, "val", "", MANY),
        ({"k" * 64: "v" * 512}, "train", "", {"k" * 64: "v" * 512}),
        ({"tags": "t", "model_extra": "m", "about": "x"}, "train", "", {"tags": "t", "model_extra": "m", "about": "x"}),
        (None, "train", "", {}),
    ],
)
async def test_valid_metadata_is_recorded(
    agent: Any, metadata: dict[str, Any] | None, split: str, untrainable: str, tags: dict[str, str] | None
) -> None:
    response = await agent.chat("hi", metadata=metadata)
    assert response.status_code == 200, response.text
    record = await agent.recorded(response.headers["x-interaction-id"])
    assert (record.split, record.untrainable) == (split, untrainable)
    expected = {"a": "7", "b": "0.5", "c": "true", "d": "é"} if tags is None else tags
    assert record.tags == expected


@pytest.mark.parametrize(
    ("metadata", "pointer", "words"),
    [
        *[({"split": split}, "/metadata/split", "'val'") for split in ("test", "eval", "holdout", "Val", "", 1)],
        *[({"train": train}, "/metadata/train", "true or false") for train in ("no", "0", 0, 1, "", [])],
        ({**MANY, "one": "more"}, "/metadata", "at most 16 tags"),
        ({**MANY, "user_id": "eve"}, "/metadata", "at most 16 tags"),
        ({"k" * 65: "v"}, "/metadata/", "64"),
        ({"": "v"}, "/metadata/", "1"),
        ({"k": "v" * 513}, "/metadata/k", "512"),
        *[({"k": value}, "/metadata/k", "a string, a number or a boolean") for value in (None, [], {"a": "b"})],
        ({"user_id": True}, "/metadata/user_id", "string or an integer"),
        ({"user_id": 4.5}, "/metadata/user_id", "string or an integer"),
        ({"user_id": ["eve"]}, "/metadata/user_id", "string or an integer"),
        ({"episode_id": ["e"]}, "/metadata/episode_id", "string or an integer"),
        (["split"], "/metadata", ""),
    ],
)
async def test_invalid_metadata_is_refused_and_nothing_recorded(
    agent: Any, metadata: Any, pointer: str, words: str
) -> None:
    before = len(await agent.interactions())
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"prompt": "hi"}),
    ):
        response = await agent.client.post(f"/v1/{path}", json={"model": "agent", "metadata": metadata, **body})
        assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_body"), response.text
        (flaw,) = response.json()["errors"]
        assert flaw["pointer"].startswith(pointer), flaw
        assert words in flaw["detail"], flaw
    assert len(await agent.interactions()) == before


async def test_an_episode_has_the_same_tags(agent: Any) -> None:
    for tags in (MANY | {"one": "more"}, {"k" * 65: "v"}, {"k": "v" * 513}, {"": "v"}, {"k": 1}):
        reply = await agent.client.post("/v1/episodes", json={"model": "agent", "tags": tags})
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_body"), tags
    assert (await agent.client.post("/v1/episodes", json={"model": "agent", "tags": MANY})).status_code == 201
