"""Users of requests, named by `user`, `metadata.user_id`, `safety_identifier` or the episode, stored as pseudonyms."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.protocol import subjects
from penstock.shared.protocol.live.episode import EpisodeRecord
from penstock.shared.protocol.live.interaction import Interaction

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def answered(agent: Any, **more: Any) -> Interaction:
    """Send a chat; return its record."""
    response = await agent.chat("hi", **more)
    assert response.status_code == 200, response.text
    record: Interaction = await agent.recorded(response.headers["x-interaction-id"])
    return record


@pytest.mark.parametrize(
    ("more", "user", "tags"),
    [
        ({"metadata": {"user_id": "eve", "task": "t"}}, "p-eve", {"user_id": "p-eve", "task": "t"}),
        ({"metadata": {"user_id": 42}}, "p-42", {"user_id": "p-42"}),
        ({"metadata": {f"k{n:02}": "v" for n in range(15)} | {"user_id": "eve"}}, "p-eve", None),
        ({"user": "ann", "metadata": {"user_id": "eve"}}, "p-ann", {"user_id": "p-eve"}),
        ({"metadata": {"user_id": None}}, "", {}),
        ({"safety_identifier": "eve"}, "p-eve", {}),
        ({"metadata": {"user_id": "ann"}, "safety_identifier": "eve"}, "p-ann", {"user_id": "p-ann"}),
        ({"user": "ann", "safety_identifier": "eve"}, "p-ann", {}),
    ],
)
async def test_the_metadata_names_the_user(agent: Any, more: Any, user: str, tags: dict[str, str] | None) -> None:
    record = await answered(agent, **more)
    assert record.user == user
    assert tags is None or record.tags == tags
    assert b"eve" not in msgspec.msgpack.encode(record).replace(b"p-eve", b"")


@pytest.mark.parametrize("named", [{"metadata": {"user_id": "no-eve"}}, {"safety_identifier": "no-eve"}])
async def test_an_opt_out_counts_for_every_field_that_names_the_user(agent: Any, named: dict[str, Any]) -> None:
    assert (await answered(agent, **named)).untrainable == "opted_out"


async def test_an_episode_has_a_user(agent: Any) -> None:
    for body, user in (
        ({"tags": {"user_id": "eve", "task": "t"}}, "p-eve"),
        ({"user": "ann", "tags": {"user_id": "eve"}}, "p-ann"),
    ):
        episode = (await agent.client.post("/v1/episodes", json={"model": "agent", **body})).json()
        assert (episode["user"], episode["tags"]["user_id"]) == (user, "p-eve")
        path = f"/e/{episode['id']}/v1/chat/completions"
        turn = await answered(agent, path=path)
        assert (turn.user, turn.tags["user_id"]) == (user, "p-eve")
        for named in ({"metadata": {"user_id": "ben"}}, {"safety_identifier": "ben"}):
            assert (await answered(agent, path=path, **named)).user == "p-ben"


async def test_an_episode_of_an_earlier_version_shows_only_a_pseudonym(agent: Any) -> None:
    """The earlier version stored the tag as it was sent, and no user."""
    episode = (await agent.client.post("/v1/episodes", json={"model": "agent", "user": "ann"})).json()
    kv = agent.bus.kv(subjects.EPISODES)
    [entry] = [entry for entry in await kv.entries() if episode["id"].encode() in entry.value]
    record = EpisodeRecord.model_validate_json(entry.value)
    old = record.model_copy(update={"user": "", "tags": {"user_id": "eve"}})
    await kv.put(entry.key, old.model_dump_json().encode())
    async with agent.replica() as front:  # which has not read it before
        path = f"/e/{episode['id']}/v1/chat/completions"
        response = await agent.chat("hi", client=front.client, path=path)
    turn = await agent.recorded(response.headers["x-interaction-id"])
    assert (turn.user, turn.tags["user_id"]) == ("p-eve", "p-eve")


async def test_names_that_are_too_long_are_refused(agent: Any) -> None:
    for more in ({"metadata": {"user_id": "x" * 513}}, {"user": "x" * 513}, {"safety_identifier": "x" * 513}):
        assert (await agent.chat("hi", **more)).status_code == 422
    assert (await answered(agent, metadata={"user_id": "x" * 512})).user == f"p-{'x' * 512}"


async def test_the_other_names_are_counted_as_the_user(agent: Any) -> None:
    async with agent.replica(user_rate_limit="1/hour") as front:
        assert (await agent.chat("hi", client=front.client, user="ann")).status_code == 200
        for named in ({"metadata": {"user_id": "ann"}}, {"safety_identifier": "ann"}):
            refused = await agent.chat("hi", client=front.client, **named)
            assert refused.json()["error"]["code"] == "user_rate_limited"
