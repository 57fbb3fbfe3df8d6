"""Both clients, used as an agent does: to open an episode, post feedback, and read the decisions."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.client.results import Decision, OutcomeRow, Span, Trained
from penstock.shared.errors import ConfigError, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import FeedbackStatus, InteractionStatus, StatusBatch, bare_id


async def test_an_episode_from_its_opening_to_its_end(live: Any, url: str, asking: Any) -> None:
    async with asking(url) as ask:
        model = await ask("models.show", "policy")
        assert (model.id, model.job, model.online, model.policy_version) == ("policy", live.job, True, 0)
        assert await ask("models.list") == [model]
        (version,) = await ask("models.versions", "policy")
        assert (version.version, version.served, version.newest, version.checkpoint) == (0, True, True, None)

        about = {"ttl_s": 60, "split": "val", "group_id": "g", "user": "eve", "tags": {"task": "t"}}
        opened = await ask("episodes.open", "policy", **about)
        assert (opened.split, opened.group_id, opened.tags["task"]) == ("val", "g", "t")
        assert opened.user == live.service.pseudonyms.of("eve")
        assert 0 < (opened.expires_at - opened.created_at).total_seconds() <= 60
        assert opened.base_url == f"{url}/e/{opened.id}/v1"
        other = await ask("episodes.open", live.job, key={"scopes": ["feedback:write"]})
        assert [episode.id for episode in await ask("episodes.list", "policy")] == [opened.id, other.id]
        assert [episode.id for episode in await ask("episodes.list", "policy", limit=1)] == [opened.id]
        assert opened.api_key is None
        async with asking(url, api_key=other.api_key) as page:
            assert (await page("feedback", "solved", True, episode=other.id)).status == "accepted"
        key = await ask("episodes.key", opened.id, expires_in_s=30, scopes=["feedback:write"])
        assert (key.episode, key.scopes, key.base_url) == (opened.id, ["feedback:write"], opened.base_url)
        async with asking(url, api_key=key.key) as page:
            posted = await page("feedback", "solved", True, episode=opened.id, final=True)
        assert (posted.job, posted.status) == (live.job, "accepted")
        ended = await ask("episodes.end", opened.id)
        assert ended.ended_at is not None
        assert await ask("episodes.show", opened.id) == ended
        with pytest.raises(NotFound):
            await ask("episodes.show", f"ep_{live.new_id()}")
        with pytest.raises(NotFound, match="nobody"):
            await ask("models.show", "nobody")


async def test_interactions_show_their_decisions(live: Any, url: str, asking: Any) -> None:
    record = await live.record(text="first")
    follower = await live.record(text="second", episode=record.episode)
    statuses = [InteractionStatus(interaction=record.id, status="trained", ordinal=7, batch=3, version=4, time=2.0)]
    statuses.append(InteractionStatus(interaction=follower.id, status="rejected", reason="stale", time=2.0))
    batch = StatusBatch(items=[], interactions=statuses)
    await live.bus.publish(subjects.decisions(live.job), pack(batch, job=live.job))
    async with asking(url) as ask:
        found = await ask("interaction", f"chatcmpl-{record.id}")
        assert (found.id, found.text, found.episode) == (record.id, "first", record.episode)
        assert (found.token_ids, found.logprobs, found.spans) == ([3, 4], [-0.5, -0.25], [Span(3, 0, 2)])
        assert found.sampling["max_new_tokens"] == 8
        trained = Trained(step=3, version=4)
        assert found.decision == Decision(status="trained", reason="", ordinal=7, trained=trained, time=2.0)
        turns = await ask("episodes.interactions", record.episode)
        assert [(turn.id, turn.text) for turn in turns] == [(record.id, "first"), (follower.id, "second")]
        assert turns[1].decision.reason == "stale"
        assert await ask("episodes.interactions", record.episode, limit=1) == [found]
        funnel = await ask("funnel", live.job)
        assert funnel.interactions == [
            OutcomeRow(status="rejected", reason="stale", interactions=1),
            OutcomeRow(status="trained", reason="", interactions=1),
        ]
        with pytest.raises(NotFound):
            await ask("interaction", live.new_id())


async def test_every_kind_of_feedback_is_accepted(live: Any, url: str, asking: Any) -> None:
    first, second = live.new_id(), live.new_id()
    about = {"revision": 1, "tags": {"a": "b"}, "user": "eve", "observed_at": datetime(2026, 1, 1, tzinfo=UTC)}
    tokens = {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5], "policy_version": 0}
    question = [{"role": "user", "content": "hi"}]
    id = str(uuid.uuid4())
    async with asking(url) as ask:
        assert await ask("feedback", "accepted", True, inference=first, dryrun=True)
        replies = [
            await ask("feedback", "accepted", True, inference=first, weight=0.5, comment="good", id=id, **about),
            await ask("prefer", first, second, strength=0.5, **about),
            await ask("prefer", "yes", {"role": "assistant", "content": "no"}, model="policy", messages=question),
            await ask("prefer", "yes", "no", model="policy", prompt_token_ids=[1, 2]),
            await ask("correct", first, "better", **about),
            await ask("post_interaction", "policy", messages=question, completion="yes", reward=1.0),
            await ask("post_interaction", "policy", **tokens, rewards={"score": 0.5}, sampling={"top_k": 4}, **about),
            await ask("post_interaction", "policy", **tokens, episode=live.new_id(), turn=0, done=False),
        ]
        assert {reply.job for reply in replies} == {live.job}
        assert not any(reply.duplicate for reply in replies)
        item = await ask("feedback_status", id)
        assert (item.kind, item.metric, item.status, item.revision) == ("metric", "accepted", "received", 1)
        assert item.trained is None
        await live.decide(
            FeedbackStatus(feedback=id, status="trained", interactions=[first], ordinal=3, batch=2, version=5, time=2.0)
        )
        admitted = bare_id(replies[4].feedback_id)
        await live.decide(FeedbackStatus(feedback=admitted, status="admitted", ordinal=4, time=2.0))

        async def decided() -> bool:
            found = [(await ask("feedback_status", one)).status for one in (id, admitted)]
            return found == ["trained", "admitted"]

        await live.until(decided, "both decisions")
        assert (await ask("feedback_status", id)).trained == Trained(step=2, version=5)
        assert (await ask("retract", id)).too_late
        assert (await ask("retract", admitted)).too_late, "it is in training, although no update has trained it"
        assert not (await ask("retract", replies[1].feedback_id)).too_late
        funnel = await ask("funnel", live.job)
        assert (funnel.items, sum(row.items for row in funnel.data)) == (8, 8)
        assert funnel.by_status["trained"] == 1

        with pytest.raises(ConfigError, match="logprobs: 2 values for 1 token_ids"):
            await ask("post_interaction", "policy", **{**tokens, "logprobs": [0.0, 0.0]})
        with pytest.raises(ConfigError, match="needs a prompt"):
            await ask("prefer", "yes", "no", model="policy")
        with pytest.raises(ConfigError, match="no JSON form"):
            await ask("correct", first, {"role": "assistant", "content": object()})
    kinds = [item.kind for item in await live.items() if item.kind != "retraction"]
    assert kinds == ["metric", *["preference"] * 3, "correction", *["interaction"] * 3]
    items = {item.id: item for item in await live.items()}
    correction, turn = items[bare_id(replies[4].feedback_id)], items[bare_id(replies[7].feedback_id)]
    assert correction.body["corrected"] == {"role": "assistant", "content": "better"}
    assert (correction.user, correction.tags) == (live.service.pseudonyms.of("eve"), {"a": "b"})
    assert (turn.turn, turn.episode != "") == (0, True)
