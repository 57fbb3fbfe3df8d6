"""Corrections, preferences and posted interactions on a real bus become updates that can be repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.queries.audit import audit_group, audit_ledger, sealed_by_seq
from penstock.services.coordinator.queries.samples import sample_rows
from penstock.services.rollout.conversations.rendering import Renderer
from penstock.services.rollout.engines import Engine, open_engine
from penstock.services.rollout.held_weights import WeightRing
from penstock.services.rollout.serving.reading import Reader
from penstock.services.trainer.batch.inputs import decoder_of, fetch_shard, read_manifests
from penstock.services.trainer.learners.learner import Learner
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import Unavailable
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import decode_events
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.live.interaction import (
    Feedback,
    FeedbackBatch,
    FeedbackStatus,
    Interaction,
    StatusBatch,
    new_marked_id,
)
from penstock.shared.protocol.messages import Ack, BatchManifest, Report
from penstock.shared.protocol.trajectory import Group, decode_group
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import digest_of_tensors

DEADLINE_S = 40
SPEC: dict[str, Any] = {
    "kind": "online_rl", "name": "live", "sampling": {"max_new_tokens": 8},
    "model": {
        "config": {"arch": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2,
                   "num_kv_heads": 2, "max_position_embeddings": 64},
        "tokenizer": "char",
    },
    "train": {"batch_size": 2, "max_lag": 1},
    "online": {
        "max_wait_s": 3600, "off_policy": {"supervised": {}, "preference": {}, "max_share": 1.0},
        "posted": {"trusted_keys": ["trusted", "liar"], "audit_share": 1.0},
    },
}  # fmt: skip
CONFIG = OnlineJob.parse(SPEC)


@asynccontextmanager
async def leader(bus: Bus, record: JobRecord, epoch: int, data_dir: Path) -> AsyncIterator[JobRunner]:
    """Lead the job; leaving the block kills the leader."""
    supply = LiveSupply(bus, record.id, CONFIG, epoch=epoch)
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=epoch, data_dir=data_dir, supply=supply)
    task = asyncio.create_task(runner.lead())
    try:
        yield runner
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def reader(bus: Bus, job: str, *, version: int) -> AsyncIterator[Engine]:
    """Tokenize posted texts on request, as a rollout worker does; yield the engine."""
    tokenizer = build_tokenizer(CONFIG.model)
    engine = await asyncio.to_thread(
        open_engine, CONFIG.model, tokenizer, max_running=2, seed=CONFIG.seed, version=version
    )
    await engine.start()
    found = Reader(job, Renderer(tokenizer, {}), tokenizer, engine, WeightRing(0))
    server = await bus.serve(subjects.reading(job), found.read)
    try:
        yield engine
    finally:
        await server.close()
        await engine.close()


async def serve(bus: Bus, job: str, token_ids: list[int]) -> str:
    """Publish the record of one answer; return its id."""
    name, now = new_marked_id(job), time.time()
    record = Interaction(
        id=name, request=name, index=0, job=job, episode=new_marked_id(job), alone=True, key_id="k", user="u",
        split="train", untrainable="", prompt_ids=[10, 11], token_ids=token_ids, logprobs=[-3.0] * len(token_ids),
        spans=[Span(0, 0, len(token_ids))], sampling=Sampling(max_new_tokens=8), finish="stop", template="t",
        body_digest="b", text="ab", started=now, first_token=now, ended=now,
    )  # fmt: skip
    await bus.publish(subjects.interaction(job, name), pack(record, job=job), msg_id=name)
    return name


async def post_feedback(bus: Bus, job: str, name: str, kind: Any, *, key: str = "k", **fields: Any) -> None:
    item = Feedback(id=name, job=job, kind=kind, key_id=key, received=time.time(), **fields)
    await bus.publish(subjects.feedback(job), pack(FeedbackBatch(items=[item]), job=job))


async def report(bus: Bus, job: str, **fields: Any) -> None:
    """Report like the trainer: repeat until the leader acknowledges."""
    data = pack(Report(epoch=1, **fields), job=job)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(Unavailable):
                ack, _ = unpack(await bus.request(subjects.report(job), data, deadline_s=5), Ack)
                assert ack.ok, ack.reason
                return


async def until_statuses(bus: Bus, job: str, **wanted: str) -> dict[str, FeedbackStatus]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            messages = await bus.read(subjects.DECISIONS, subjects.decisions(job))
            found = {
                status.feedback: status for message in messages for status in unpack(message.data, StatusBatch)[0].items
            }
            if {name: found[name].status for name in wanted if name in found} == wanted:
                return found
            await asyncio.sleep(0.05)


async def until_manifest(bus: Bus, job: str, number: int) -> BatchManifest:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            manifests = await read_manifests(bus, job)
            if (number, 1) in manifests:
                return manifests[number, 1]
            await asyncio.sleep(0.05)


async def train(bus: Bus, learner: Learner, manifest: BatchManifest) -> str:
    """Train one batch from the stored groups; return the digest of the weights."""
    positions = list(range(len(manifest.groups)))
    shard = await fetch_shard(bus, manifest, positions, max_lag=CONFIG.train.max_lag, decode=decoder_of(CONFIG))
    await asyncio.to_thread(learner.update, shard, update_index=manifest.update_index)
    return digest_of_tensors(learner.weights())


async def every_group_of(bus: Bus, manifest: BatchManifest) -> list[Group]:
    found = await bus.get_whole(subjects.EXPERIENCE, [group.seq for group in manifest.groups])
    return [decode_group(message.data) for message in found.values()]


async def groups_of(bus: Bus, manifest: BatchManifest) -> dict[str, Group]:
    return {group.objective: group for group in await every_group_of(bus, manifest)}


async def test_examples_are_trained_once_audited_and_repeated(bus: Bus, tmp_path: Path) -> None:
    record = await JobStore(bus).create(CONFIG)
    job = record.id
    learner, again = Learner(CONFIG), Learner(CONFIG)
    tokenizer = build_tokenizer(CONFIG.model)
    async with leader(bus, record, 1, tmp_path):
        await report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        good, bad = await serve(bus, job, [20, 21]), await serve(bus, job, [22])
        await post_feedback(
            bus,
            job,
            "corrected",
            "correction",
            inference=bad,
            body={"corrected": {"role": "assistant", "content": "7+8"}},
        )
        await post_feedback(
            bus, job, "preferred", "preference", inference=good, body={"chosen": good, "rejected": bad, "strength": 1.0}
        )
        await until_statuses(bus, job, corrected="admitted", preferred="admitted")
    # The text waits for a worker to read it, and its draw survives the leader.
    async with leader(bus, record, 2, tmp_path) as runner, reader(bus, job, version=1) as engine:
        manifest = await until_manifest(bus, job, 1)
        found = await groups_of(bus, manifest)
        assert sorted(found) == ["preference", "supervised"]
        assert tokenizer.decode(found["supervised"].token_ids.tolist()) == "7+8<eos>"
        (shown,) = sample_rows(1, [found["supervised"]])
        assert (shown["prompt"], shown["completion"]) == (tokenizer.decode([10, 11]), "7+8<eos>")
        assert found["supervised"].prompt_ids.tolist() == [10, 11]
        assert found["preference"].token_ids.tolist() == [20, 21, 22], "the better one first"
        first = await train(bus, learner, manifest)
        await report(bus, job, kind="trained", batch=1, revision=1, version=1, digest=first)
        statuses = await until_statuses(bus, job, corrected="trained", preferred="trained")
        assert statuses["corrected"].reason == "supervised: correction"
        assert statuses["preferred"].interactions == [good, bad]
        exact = await engine.score([10, 11, 30, 31])
        posted = {"prompt_token_ids": [10, 11], "token_ids": [30, 31], "policy_version": 1, "reward": 1.0}
        await post_feedback(
            bus, job, "true", "interaction", key="trusted", body=posted | {"logprobs": exact.logprobs[1:]}
        )
        await post_feedback(bus, job, "false", "interaction", key="liar", body=posted | {"logprobs": [-0.01, -0.01]})
        await post_feedback(bus, job, "text", "interaction", body={"messages": [{"role": "user", "content": "1+1"}],
                  "completion": {"role": "assistant", "content": "2"}, "reward": 0.5})  # fmt: skip
        await post_feedback(bus, job, "unread", "interaction", body={"messages": [{"role": "user", "content": "1+1"}],
                  "completion": {"role": "assistant", "content": "\u2713"}, "reward": 0.5})  # fmt: skip
        statuses = await until_statuses(bus, job, true="admitted", false="rejected", text="admitted", unread="rejected")
        assert (statuses["false"].reason, statuses["unread"].reason) == ("logprobs_differ", "not_encodable")
        await post_feedback(
            bus, job, "again", "interaction", key="liar", body=posted | {"logprobs": exact.logprobs[1:]}
        )
        async with asyncio.timeout(DEADLINE_S):
            while len(runner.run.candidates) < 3:  # auxiliary groups join the batch if they have arrived by then
                await asyncio.sleep(0.05)
        await post_feedback(bus, job, "liked", "metric", inference=good, metric="reward", value=-1.0)
        manifest = await until_manifest(bus, job, 2)
        assert sorted(group.objective for group in manifest.groups) == ["policy", "policy", "supervised", "supervised"]
        second = await train(bus, learner, manifest)
        await report(bus, job, kind="trained", batch=2, revision=1, version=2, digest=second)
        statuses = await until_statuses(bus, job, true="trained", text="trained", again="trained", liked="trained")
        assert (statuses["true"].reason, statuses["again"].reason) == ("posted", "supervised: source_distrusted")
        asked = {"messages": [{"role": "user", "content": "1+1"}], "strength": 0.5}
        two, same = {"role": "assistant", "content": "2"}, {"content": "2"}
        await post_feedback(bus, job, "same", "preference", body=asked | {"answers": [two, same]})
        await post_feedback(bus, job, "texts", "preference", body=asked | {"answers": [two, {"content": "31"}]})
        tokens = {"prompt_token_ids": [10, 11], "answers": [{"content": "7"}, {"content": "8"}], "strength": 1.0}
        await post_feedback(bus, job, "tokens", "preference", body=tokens)
        statuses = await until_statuses(bus, job, same="rejected", texts="admitted", tokens="admitted")
        assert statuses["same"].reason == "same_answer"
        manifest = await until_manifest(bus, job, 3)
        assert [(group.objective, group.rewards) for group in manifest.groups] == [
            ("preference", [0.5, 0.5]), ("preference", [1.0, 1.0]),
        ]  # fmt: skip
        between = min((await every_group_of(bus, manifest)), key=lambda group: float(group.rewards[0]))
        assert [tokenizer.decode(between.token_ids[cut].tolist()) for cut in (slice(0, 2), slice(2, 5))] == [
            "2<eos>", "31<eos>",
        ]  # fmt: skip
        third = await train(bus, learner, manifest)
        await report(bus, job, kind="trained", batch=3, revision=1, version=3, digest=third)
        statuses = await until_statuses(bus, job, texts="trained", tokens="trained")
        assert statuses["texts"].reason == "preference: texts"
        known = set(runner.run.candidates)
        newer = posted | {"policy_version": 2, "logprobs": [-0.01, -0.01]}
        await post_feedback(bus, job, "newer", "interaction", key="trusted", body=newer)
        async with asyncio.timeout(DEADLINE_S):
            while not runner.run.candidates.keys() - known:
                await asyncio.sleep(0.05)
        assert runner.run.state.distrusted == {"liar"}, "the worker has another version than the one that sampled it"

    repeated = [await train(bus, again, await until_manifest(bus, job, number)) for number in (1, 2, 3)]
    assert repeated == [first, second, third]
    entries = [decode_events(m.data) for m in await bus.read(subjects.LEDGER, subjects.ledger(job))]
    audit = audit_ledger(entries, CONFIG)
    messages = await bus.get_whole(subjects.EXPERIENCE, sealed_by_seq(audit))
    for seq, (number, one) in sealed_by_seq(audit).items():
        audit_group(audit, number, one, decode_group(messages[seq].data), one.digest)
    assert not audit.violations
    assert audit.state.balanced()
    assert (audit.state.trained, dict(audit.state.dropped)) == (
        8, {"logprobs_differ": 1, "not_encodable": 1, "same_answer": 1},
    )  # fmt: skip
