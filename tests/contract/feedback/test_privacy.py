"""Users: pseudonyms everywhere, opt-out, and a deletion that leaves no byte of their data."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.dead_letters import payload_of, read_dead_letters
from penstock.services.coordinator.leader.effects import EffectPublisher
from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import SCHEMA, pack, unpack
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    BatchTrained,
    Event,
    SealedGroup,
    encode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.episode import EpisodeRecord
from penstock.shared.protocol.live.interaction import (
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    bare_id,
)
from penstock.shared.protocol.parts import PART
from penstock.shared.protocol.trajectory import GroupHeader, group_headers
from penstock.shared.transport.bus import Outgoing
from tests.live_leader import record_decided

MARKER = "the-marker-nobody-else-writes-7351"
USER = "marker-user@example.org"


def files_with(folder: Path, *texts: str) -> dict[str, list[str]]:
    """Return the files below ``folder`` whose bytes contain one of ``texts``, each with the texts found."""
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        hits = [text for text in texts if text.encode() in data]
        if hits:
            found[str(path.relative_to(folder))] = hits
    return found


async def test_no_byte_of_a_deleted_user_is_left(live: Any, nats_server: Any, tmp_path: Path) -> None:
    mine = await live.record(USER, text=MARKER)
    twice = subjects.interaction(live.job, mine.id)  # recorded when it was broken off, and when it was completed
    await live.bus.publish(twice, pack(mine, job=live.job), msg_id=f"{mine.id}/cut")
    large = await live.record(USER, text=MARKER + "x" * 2000, prompt=MARKER * 60_000)
    assert large.prompt, "a record in parts"
    other = await live.record("somebody else", text="kept")
    await live.record(text=MARKER, tags={"user_id": mine.user})
    theirs, spoken, kept = [
        await opened(live, **body)
        for body in ({"tags": {"user_id": USER, "note": MARKER}}, {"tags": {"note": MARKER}}, {"user": "somebody else"})
    ]
    await live.record(USER, text=MARKER, episode=bare_id(spoken))
    await live.record(USER, text=MARKER, episode=bare_id(kept))
    about = {"metric_name": "comment", "tags": {"user_id": USER}}
    posts = [
        {"inference_id": mine.id, **about, "value": MARKER},
        {"inference_id": other.id, "metric_name": "comment", "value": "kept, too"},
        {"inference_id": large.id, "metric_name": "accepted", "value": True, "comment": MARKER},
        {"kind": "interaction", "model": "policy", "completion": {"content": MARKER * 60_000}, "user": USER},
        {"kind": "preference", "model": "policy", "messages": [{"role": "user", "content": MARKER}], "user": USER,
         "chosen": MARKER, "rejected": "kept"},
        {"inference_id": other.id, "metric_name": "comment", "value": MARKER, "user": "x", "tags": {"user_id": USER}},
    ]  # fmt: skip
    reply = await live.client.post("/v1/feedback/batch", json=posts)
    ids = [row["id"] for row in reply.json()["data"]]
    assert reply.json()["accepted"] == 6
    status = FeedbackStatus(feedback=ids[0], status="trained", interactions=[mine.id], batch=1, version=2, time=1.0)
    await live.decide(status)
    await live.until(lambda: is_trained(live, ids[0]), "status trained")
    await store_group(live, live.job, 0, MARKER)
    await store_group(live, live.job, 1, "kept")
    hidden, others = await live.record(USER, text=MARKER), await live.record("somebody else", text="kept, too")
    await make_unreadable(live, [hidden, others], about=mine.id)
    await bury_all(live)
    admission = Admission(0, {mine.id: 1}, {ids[0]: 1}, 1.0, 0, "local", mine.user, "feedback", 1.0)
    await admit(live, live.job, admission, then=trained_on(Draw(0), version=2))
    assert files_with(nats_server.directory, MARKER), "the test would find it"
    assert files_with(nats_server.directory, USER) == {}, "a user's name never reaches the disk"

    reply = await live.client.delete(f"/v1/users/{USER}/data")
    assert reply.status_code == 202, reply.text

    report = await deleted(live)
    assert (report["interactions"], report["feedback"], report["groups"], report["episodes"]) == (6, 5, 2, 2)
    assert report["trained_versions"] == {live.job: [2]}
    assert report["user"] == mine.user
    assert files_with(nats_server.directory, MARKER, USER) == {}
    assert files_with(tmp_path, MARKER, USER) == {}
    assert [item.value for item in await live.items()] == ["kept, too"]
    left = [(await live.client.get(f"/v1/episodes/{id}")).json() for id in (theirs, spoken, kept)]
    assert [(row["tags"], row["ended_at"] is None) for row in left] == [({}, False), ({}, False), ({}, True)]
    subject_of = {subjects.interaction(live.job, record.id) for record in (other, others)}
    assert {one.subject for one in await live.bus.read(subjects.INTERACTIONS, "interactions.>")} == subject_of
    dead_letters = await read_dead_letters(live.bus, live.job)
    assert sorted(one.stream for one in dead_letters) == ["EXPERIENCE", "FEEDBACK", "INTERACTIONS", "INTERACTIONS"]
    (rewritten,) = [(await payload_of(live.bus, one))[0] for one in dead_letters if one.stream == subjects.FEEDBACK]
    assert [item.value for item in unpack(rewritten, FeedbackBatch)[0].items] == ["kept, too"]

    async def forgotten() -> bool:
        return (await live.client.get(f"/v1/feedback/{ids[0]}")).status_code == 404

    await live.until(forgotten, "index that has forgotten")
    assert (await live.status_of(ids[1]))["status"] == "received"
    again = await live.post({"inference_id": mine.id, "metric_name": "accepted", "value": True})
    assert (again.status_code, again.json()["error"]["code"]) == (410, "erased")
    again = await live.post({"inference_id": other.id, "feedback_id": ids[0], "metric_name": "accepted", "value": True})
    assert again.status_code == 410


async def deleted(live: Any) -> Any:
    """Wait until the deletion of the data of ``USER`` is done; return its report."""

    async def done() -> Any:
        report = (await live.client.get(f"/v1/users/{USER}/data")).json()
        return report if report["status"] == "done" else None

    return await live.until(done, "end of the deletion")


async def store_group(live: Any, job: str, ordinal: int, text: str) -> None:
    header = GroupHeader(
        draw=Draw(ordinal), attempt="a", epoch=1, digest="d", nbytes=9, prompt_tokens=1, lengths=[1],
        rewards=[0.0], failed=[False], truncated=[False], finite=True, min_version=0, max_version=0, worker="w",
    )  # fmt: skip
    await live.bus.publish(subjects.experience(job), text.encode(), headers=group_headers(header))


async def admit(live: Any, job: str, *admissions: Admission, low: int = 0, then: tuple[Event, ...] = ()) -> None:
    """Append admissions to the ledger, as the leader does, then the events ``then``.

    Everything below the sequence ``low`` in FEEDBACK counts as decided.
    """
    event = Admitted(
        writer_epoch=1, time=1.0, admissions=list(admissions), low_interactions=0, low_feedback=low
    )  # fmt: skip
    await live.bus.publish(subjects.ledger(job), encode_events([event, *then]))


def trained_on(draw: Draw, *, version: int) -> tuple[Event, ...]:
    """Return the ledger events of a batch of one group whose training creates ``version``."""
    group = SealedGroup(draw, "a", 1, "d", 0, 0, [1.0], 4, "w")
    base: dict[str, Any] = {"writer_epoch": 1, "time": 1.0, "number": 1, "revision": 1}
    return (
        BatchSealed(**base, start_version=version - 1, update_index=0, groups=[group]),
        BatchTrained(**base, version=version, digest="w", trainer_epoch=1),
    )


async def opened(live: Any, **body: Any) -> str:
    """Open an episode; return its id."""
    reply = await live.client.post("/v1/episodes", json={"model": "policy", **body})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def of_another_schema(data: bytes) -> bytes:
    """Return the envelope with an unknown schema version."""
    assert data[1] == SCHEMA
    return data[:1] + b"\x7f" + data[2:]


async def make_unreadable(live: Any, records: list[Interaction], *, about: str) -> None:
    """Replace records by messages that do not decode, and publish such feedback on the interaction ``about``."""
    for record in records:
        message = await live.bus.last(subjects.INTERACTIONS, subjects.interaction(live.job, record.id))
        await live.bus.delete_message(subjects.INTERACTIONS, message.seq)
        await live.bus.publish(message.subject, of_another_schema(message.data), headers=message.headers)
    for text in (MARKER, MARKER * 60_000):  # the second one in several messages
        item = Feedback(
            id=live.new_id(), job=live.job, kind="metric", key_id="k", received=1.0, inference=about, metric="comment",
            value=text,
        )  # fmt: skip
        data = of_another_schema(pack(FeedbackBatch(items=[item]), job=live.job))
        await live.bus.publish_whole([Outgoing(subjects.feedback(live.job), data)])


async def bury_all(live: Any) -> None:
    """Copy all messages to the dead letters, as leaders do with messages that they cannot use."""
    publisher = EffectPublisher(live.bus, live.job, epoch=1)
    for stream in (subjects.INTERACTIONS, subjects.FEEDBACK, subjects.EXPERIENCE):
        for message in await live.bus.read(stream, f"{stream.lower()}.>", headers_only=True):
            if PART not in message.headers:
                await publisher.copy_to_dead(stream, message.seq, reason="undecodable", attempts=1)
    assert any(len(dead_letter.places) > 1 for dead_letter in await read_dead_letters(live.bus, live.job)), (
        "no dead letter has several parts"
    )


async def test_what_earlier_versions_stored_under_a_name_is_deleted(live: Any, nats_server: Any) -> None:
    await live.record(text=MARKER, tags={"user_id": USER})
    id = await opened(live)
    kv = live.bus.kv(subjects.EPISODES)
    (entry,) = await kv.entries()
    record = EpisodeRecord.model_validate_json(entry.value).model_copy(update={"tags": {"user_id": USER}})
    await kv.update(entry.key, record.model_dump_json().encode(), entry.revision, keep_s=60)
    assert files_with(nats_server.directory, USER), "the test would find it"
    report = (await live.client.delete(f"/v1/users/{USER}/data")).json()
    assert (report["status"], report["interactions"], report["episodes"]) == ("done", 1, 1)
    assert files_with(nats_server.directory, MARKER, USER) == {}
    assert (await live.client.get(f"/v1/episodes/{id}")).json()["ended_at"] is not None


async def is_trained(live: Any, id: str) -> bool:
    return bool((await live.status_of(id))["status"] == "trained")


async def test_a_deletion_is_taken_up_by_the_next_process(open_live: Any) -> None:
    async with open_live() as first:
        await first.record(USER, text=MARKER)
        await first.service._eraser.begin(first.service.pseudonyms.of(USER))
    async with open_live() as second:

        async def gone() -> bool:
            return not await second.bus.read(subjects.INTERACTIONS, "interactions.>")

        await second.until(gone, "deletion")


async def test_consent_reaches_every_replica(open_live: Any, tmp_path: Path) -> None:
    async with open_live() as first, open_live(tmp_path / "other") as second:
        pseudonym = first.service.pseudonyms.of(USER)
        assert pseudonym == second.service.pseudonyms.of(USER)
        for train in (False, True):
            reply = await first.client.put(f"/v1/users/{USER}/consent", json={"train": train})
            assert reply.json() == {"user": pseudonym, "train": train}

            async def has_consent(train: bool = train) -> bool:
                return bool(second.service.consents.opted_out(pseudonym) is not train)

            await second.until(has_consent, "consent")
        assert (await first.client.put(f"/v1/users/{USER}/consent", json={"train": 1})).status_code == 422
        assert (await first.client.get("/v1/users/nobody/data")).status_code == 404


async def test_no_pseudonym_is_returned_before_consents_are_loaded(bus: Any, tmp_path: Path) -> None:
    """Otherwise a gateway would record answers to users who consented as `no_consent`, for good."""
    first, second = (FeedbackService(bus, JobStore(bus), tmp_path / name) for name in "ab")
    await first._load()
    pseudonym = first.pseudonyms.of(USER)
    await first.consents.say(pseudonym, train=True)
    held, read = asyncio.Event(), second.consents.read

    async def slowly() -> None:
        await held.wait()
        await read()

    second.consents.read = slowly  # type: ignore[method-assign]
    loading = asyncio.create_task(second._load())
    await asyncio.sleep(0.2)
    with pytest.raises(Unavailable):
        second.pseudonyms.of(USER)
    held.set()
    await asyncio.wait_for(loading, 10)
    assert second.consents.of(second.pseudonyms.of(USER)) is True


async def test_targets_and_retractions(live: Any) -> None:
    known = await live.record()

    async def target() -> bool:
        return bool((await live.accept(inference_id=known.id))["target"] == "known")

    await live.until(target, "known target")
    episode = {"inference_id": None, "episode_id": f"ep_{known.episode}", "metric_name": "solved"}
    assert (await live.accept(**episode))["target"] == "known"
    id = (await live.accept())["feedback_id"]
    replies = [await live.client.post(f"/v1/feedback/{id}/retract") for _ in range(2)]
    assert [(reply.status_code, reply.json()["duplicate"]) for reply in replies] == [(202, False), (202, True)]
    (item,) = [item for item in await live.items() if item.kind == "retraction"]
    assert (item.body, item.job) == ({"feedback": id}, live.job)

    async def requested() -> bool:
        return bool((await live.status_of(id))["retraction_requested"])

    await live.until(requested, "note of the retraction")
    unknown = await live.client.post("/v1/feedback/0192f0c1-0000-7000-8000-000000000009/retract")
    assert unknown.status_code == 404


async def test_a_deletion_republishes_no_decided_feedback_of_others(live: Any) -> None:
    """A later leader would take a republished item for a new one.

    A retraction is republished only if its item is undecided.
    """
    mine, other = await live.record(USER), await live.record("somebody else")
    about = {"metric_name": "accepted", "value": True}
    posts = [{"inference_id": one.id, **about} for one in (mine, other, other, other, other)]
    reply = await live.client.post("/v1/feedback/batch", json=posts)
    gone, decided, waiting, held, revised = [row["id"] for row in reply.json()["data"]]
    (message,) = await live.bus.read(subjects.FEEDBACK, subjects.feedback(live.job))
    (items,) = await live.stored()
    retractions = [
        Feedback(id=f"r-{name}", job=live.job, kind="retraction", key_id="k", received=1.0, body={"feedback": name})
        for name in (decided, waiting)
    ]
    batch = pack(FeedbackBatch(items=[*items, *retractions]), job=live.job)
    await live.bus.publish(subjects.feedback(live.job), batch)
    await live.bus.delete_message(subjects.FEEDBACK, message.seq)
    await record_decided(
        live.bus,
        live.job,
        FeedbackStatus(feedback=decided, status="expired", time=1.0),
        FeedbackStatus(feedback=revised, status="rejected", reason="quarantine_full", time=1.0),
    )
    assert (await live.client.delete(f"/v1/users/{USER}/data")).status_code == 202
    await deleted(live)
    assert [item.id for item in await live.items()] == [waiting, held, revised, f"r-{waiting}"]
    assert gone not in {item.id for item in await live.items()}
    assert {item.seq for item in await live.items()} == {message.seq + 1}, "what is newer stays newer"


@pytest.mark.parametrize("decision", ["refused", "admitted", "below the mark"])
async def test_a_deletion_finds_decided_feedback_in_the_ledger(live: Any, decision: str) -> None:
    """A deletion reads from the ledger alone which items are decided: DECISIONS may no longer hold them."""
    mine, other = await live.record(USER), await live.record("somebody else")
    posts = [{"inference_id": one.id, "metric_name": "accepted", "value": True} for one in (mine, other)]
    reply = await live.client.post("/v1/feedback/batch", json=posts)
    gone, decided = [row["id"] for row in reply.json()["data"]]
    (message,) = await live.bus.read(subjects.FEEDBACK, subjects.feedback(live.job))
    trained = Admission(0, {mine.id: 1}, {gone: message.seq}, 1.0, 0, "local", mine.user, "feedback", 1.0)
    admitted = Admission(1, {other.id: 2}, {decided: message.seq}, 1.0, 0, "local", other.user, "feedback", 1.0)
    below = decision == "below the mark"
    then = trained_on(Draw(0), version=4)
    low = message.seq + 1 if below else 0
    await admit(live, live.job, *([trained, admitted] if decision == "admitted" else [trained]), low=low, then=then)
    if decision == "refused":
        refused = FeedbackStatus(feedback=decided, status="rejected", reason="no_feedback", time=1.0)
        await record_decided(live.bus, live.job, refused)
    assert (await live.client.delete(f"/v1/users/{USER}/data")).status_code == 202
    report = await deleted(live)
    assert report["trained_versions"] == {live.job: [4]}
    assert await live.items() == [], "a later leader would admit it once more"


async def test_a_repeated_deletion_finds_groups_created_meanwhile(live: Any) -> None:
    """A leader may admit an answer during the deletion; afterwards no record is left that names the user."""
    mine = await live.record(USER)
    assert (await live.client.delete(f"/v1/users/{USER}/data")).status_code == 202
    assert (await deleted(live))["interactions"] == 1
    elsewhere = f"job_{'7' * 32}"
    about = Admission(0, {}, {"f": 9}, 1.0, 0, "k", "x", "correction", 1.0, "supervised", {mine.id: 1})
    theirs = Admission(0, {live.new_id(): 9}, {}, 1.0, 0, "k", mine.user, "default", 1.0)
    for job, admission in ((live.job, about), (elsewhere, theirs)):
        others = Admission(1, {live.new_id(): 9}, {}, 1.0, 0, "k", "x", "default", 1.0)
        await admit(live, job, admission, others)
        await store_group(live, job, 0, MARKER)
        await store_group(live, job, 1, "kept")
    await make_unreadable(live, [], about=mine.id)
    assert (await live.client.delete(f"/v1/users/{USER}/data")).status_code == 202
    report = await deleted(live)
    assert (report["interactions"], report["groups"]) == (1, 2), "of all that was ever deleted"
    left = [await live.bus.read(subjects.EXPERIENCE, subjects.experience(job)) for job in (live.job, elsewhere)]
    assert [[message.data for message in messages] for messages in left] == [[b"kept"], [b"kept"]]
    assert await live.bus.read(subjects.FEEDBACK, subjects.feedback(live.job)) == [], "they spell a deleted id"


async def test_clients_and_commands_for_users(live: Any, url: str, monkeypatch: Any) -> None:
    record = await live.record(user="eve/1 ?")
    await live.accept(inference_id=record.id, user="eve")
    monkeypatch.setenv("PENSTOCK_URL", url)

    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, ["users", *words])

    async with AsyncClient(url) as client:
        assert (await client.users.consent("eve", train=False)).train is False
        assert live.service.consents.opted_out(live.service.pseudonyms.of("eve"))
        with pytest.raises(NotFound):
            await client.users.erasure("nobody")
        assert (await client.users.erase("eve")).feedback == 1
    assert "may be trained on" in (await asyncio.to_thread(run, "consent", "eve", "--train")).stdout
    gone = await asyncio.to_thread(run, "erase", "eve", "--json")
    assert json.loads(gone.stdout)["status"] == "done"
    assert "none" in (await asyncio.to_thread(run, "status", "eve")).stdout
    assert (await asyncio.to_thread(run, "status", "nobody")).exit_code == 1
