"""Live requests: their redaction before they are stored, and sampling that the job forces to be able to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.rollout.serving.recorder import Recorder
from penstock.shared.protocol import subjects
from penstock.shared.protocol.generation import Span
from penstock.shared.protocol.live.interaction import Redacted, new_marked_id

FINDER = """
def find(text):
    if "broken" in text:
        raise RuntimeError("this text cannot be looked through")
    return []
"""


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a redaction function that fails for some texts."""
    (tmp_path / "finder_of_test_stored.py").write_text(FINDER)
    monkeypatch.syspath_prepend(tmp_path)
    return "finder_of_test_stored:find"


async def test_secrets_are_redacted_and_the_job_forces_its_sampling(stack_of: Any, finder: str) -> None:
    redaction = {"patterns": {"place": "wor?ld"}, "function": finder}
    async with stack_of(redaction=redaction, forced_sampling=True) as stack:
        response = await stack.chat("hi", temperature=0.3, top_p=0.5, top_k=3, logit_bias={"5": 1.0}, user="ann")
        assert response.json()["choices"][0]["message"]["content"] == "hello world and more", "as it was sampled"
        assert "x-recorded" not in response.headers
        record = await stack.recorded(response.headers["x-interaction-id"])
        assert (record.text, record.untrainable) == ("hello [place] and more", "redacted")
        assert record.redacted == [Redacted("completion", 1, 3, "place")]
        assert (record.token_ids[1:3], len(set(record.token_ids[3:]))) == ([0, 0], 3)
        assert len(record.logprobs) == len(record.token_ids)
        messages = await stack.bus.read(subjects.INTERACTIONS, subjects.interactions(stack.job))
        assert not any(b"world" in message.data for message in messages)

        asked = await stack.chat("hello world")
        prompt = await stack.recorded(asked.headers["x-interaction-id"])
        assert (prompt.prompt_ids[1:], prompt.untrainable) == ([0, 0], "redacted")
        assert (prompt.prompt, prompt.text) == ("hello[place]", " and more")

        plain = await stack.chat("again", temperature=0, max_tokens=3, stop="xyz")
        record = await stack.recorded(plain.headers["x-interaction-id"])
        assert (record.sampling.temperature, record.sampling.top_p, record.untrainable) == (1.0, 1.0, "")
        assert len(record.token_ids) == 3, "its length is the client's"

        before = len(await stack.interactions())
        unread = await stack.chat("bad")
        assert (unread.status_code, unread.headers["x-recorded"]) == (200, "false"), "serving goes on"
        assert len(await stack.interactions()) == before, "a text that could not be searched is not stored"

        comment = {"inference_id": plain.json()["id"], "metric_name": "comment", "value": "the whole world knows"}
        assert (await stack.client.post("/v1/feedback", json=comment)).status_code == 202
        posted = {
            "kind": "interaction",
            "model": "agent",
            "prompt_token_ids": [5],
            "token_ids": [6],
            "logprobs": [-1.0],
        }
        refused = await stack.client.post("/v1/feedback", json=posted)
        assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/token_ids")
        messages = await stack.bus.read(subjects.FEEDBACK, subjects.feedback(stack.job))
        assert [b"the whole [place] knows" in message.data for message in messages] == [True]

        pair = {"kind": "preference", "model": "agent", "chosen": "the world", "rejected": "no"}
        refused = await stack.client.post("/v1/feedback", json={**pair, "prompt_token_ids": [5]})
        assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/prompt_token_ids")
        asked = {**pair, "messages": [{"role": "user", "content": "which world?"}]}
        assert (await stack.client.post("/v1/feedback", json=asked)).status_code == 202
        messages = await stack.bus.read(subjects.FEEDBACK, subjects.feedback(stack.job))
        assert b"the [place]" in messages[-1].data
        assert b"which [place]?" in messages[-1].data


async def test_strict_recording_refuses_an_answer_without_a_record(stack_of: Any, finder: str) -> None:
    async with stack_of(redaction={"function": finder}, strict_recording=True) as stack:
        assert (await stack.chat("hi")).status_code == 200
        refused = await stack.chat("bad")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
        assert refused.headers["retry-after"]
        stream = await stack.chat("bad", stream=True)
        assert '"code":"not_recorded"' in stream.text
        assert "[DONE]" not in stream.text
        assert (await stack.chat("bad", store=False)).status_code == 200, "which asks for none"


async def test_a_record_larger_than_a_message_is_stored_in_parts(stack_of: Any) -> None:
    async with stack_of() as stack:
        short = await stack.recorded((await stack.chat("hi")).headers["x-interaction-id"])
        count = 120_000
        spoken = {
            "token_ids": [7] * count, "logprobs": [-0.1] * count, "spans": [Span(0, 0, count)],
            "prompt": "x" * 9_000_000,
        }  # fmt: skip
        recorder, id = Recorder(stack.bus, stack.job), new_marked_id(stack.job)
        assert await recorder.record(replace(short, id=id, **spoken))
        shown = (await stack.client.get(f"/v1/interactions/{id}")).json()
        assert (shown["token_ids"], shown["spans"], shown["prompt"]) == ([7] * count, [[0, 0, count]], "")
        turns = (await stack.client.get(f"/v1/episodes/ep_{short.episode}/interactions")).json()["data"]
        assert [len(turn["token_ids"]) for turn in turns] == [len(short.token_ids), count]

        before = len(await stack.bus.read(subjects.INTERACTIONS, "interactions.>"))
        longer = replace(short, id=new_marked_id(stack.job), token_ids=[7] * 900_000, logprobs=[-0.1] * 900_000)
        assert not await recorder.record(longer), "longer than any record"
        cut = replace(short, id=new_marked_id(stack.job), finish="client_disconnected", **spoken)
        assert not await recorder.record_cut(cut), "parts could not give way to the whole answer"
        assert len(await stack.bus.read(subjects.INTERACTIONS, "interactions.>")) == before
