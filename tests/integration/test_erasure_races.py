"""Deletions split messages while a leader admits items of other users in them; each item counts once. On a real bus."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.feedback.erasure import Eraser
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.rollout.conversations.rendering import Renderer
from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.held_weights import WeightRing
from penstock.services.rollout.serving.reading import Reader
from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings, checkpoint_path
from penstock.shared.errors import Unavailable
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    JobStarted,
    LineageForked,
    decode_events,
    encode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.live.interaction import (
    RESTORED_HEADER,
    UNDECIDED,
    Erasure,
    Feedback,
    FeedbackBatch,
    FeedbackIds,
    FeedbackStatus,
    StatusBatch,
    new_marked_id,
)
from penstock.shared.protocol.messages import Ack, Command, Report
from penstock.shared.protocol.trajectory import GroupHeader, group_headers, parse_group_header
from penstock.shared.transport.bus import Bus
from tests.live_leader import record_decided

DEADLINE_S = 40
CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "live", "sampling": {"max_new_tokens": 8},
        "model": {
            "config": {"arch": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2,
                       "num_kv_heads": 2, "max_position_embeddings": 64},
            "tokenizer": "char",
        },
        "train": {"batch_size": 2, "max_lag": 1},
        "online": {"max_wait_s": 3600, "posted": {"trusted_keys": ["trusted"], "audit_share": 0.0}},
    }
)  # fmt: skip


class Scene:
    """One job on a real bus: its feedback, its ledger, and leaders, workers and trainers that a test starts."""

    def __init__(self, bus: Bus, record: JobRecord, data_dir: Path) -> None:
        self.bus, self.record, self.job, self._dir, self._epoch = bus, record, record.id, data_dir, 0

    def posted(self, user: str, version: int = 0) -> Feedback:
        """Return a posted interaction: an answer by an engine outside of Penstock."""
        body: dict[str, Any] = {
            "policy_version": version, "prompt_token_ids": [10, 11], "token_ids": [12, 2], "logprobs": [-3.0, -3.0],
            "reward": 1.0, "done": True,
        }  # fmt: skip
        return Feedback(
            id=new_marked_id(self.job), job=self.job, kind="interaction", key_id="trusted", received=time.time(),
            user=user, body=body,
        )  # fmt: skip

    async def post(self, *items: Feedback) -> None:
        await self.bus.publish(subjects.feedback(self.job), pack(FeedbackBatch(items=list(items)), job=self.job))

    @asynccontextmanager
    async def leader(self, *, reports_version: bool = True) -> AsyncIterator[None]:
        """Run a leader, killed at the end of the block; report version 0 to it, unless a real trainer does."""
        self._epoch += 1
        supply = LiveSupply(self.bus, self.job, CONFIG, epoch=self._epoch)
        runner = JobRunner(
            self.bus, JobStore(self.bus), Members(), self.record, epoch=self._epoch, data_dir=self._dir, supply=supply
        )
        task = asyncio.create_task(runner.lead())
        try:
            if reports_version:
                await self.report(kind="checkpointed", batch=0, version=0, digest="w0", path="c")
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def report(self, **fields: Any) -> None:
        """Report like the trainer: repeat until the leader acknowledges."""
        data = pack(Report(epoch=1, **fields), job=self.job)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(Unavailable):
                    ack, _ = unpack(await self.bus.request(subjects.report(self.job), data, deadline_s=5), Ack)
                    assert ack.ok, ack.reason
                    return

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """Run a worker that tokenizes posted answers; without it no group is created."""
        tokenizer = build_tokenizer(CONFIG.model)
        engine = await asyncio.to_thread(
            open_engine, CONFIG.model, tokenizer, max_running=2, seed=CONFIG.seed, version=0
        )
        await engine.start()
        found = Reader(self.job, Renderer(tokenizer, {}), tokenizer, engine, WeightRing(0))
        server = await self.bus.serve(subjects.reading(self.job), found.read)
        try:
            yield
        finally:
            await server.close()
            await engine.close()

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[None]:
        """Run a real trainer, killed at the end of the block."""
        settings = ServiceSettings(data_dir=self._dir, shm_dir=self._dir, worker_id="trainer-0", lease_s=0.5)
        task = asyncio.create_task(TrainerSession(self.bus, settings, self.job, CONFIG).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def events(self) -> list[Event]:
        entries = await self.bus.read(subjects.LEDGER, subjects.ledger(self.job))
        return [event for entry in entries for event in decode_events(entry.data)]

    async def admissions(self) -> dict[str, list[Admission]]:
        """Return all admissions of each item."""
        found: dict[str, list[Admission]] = {}
        for event in await self.events():
            for one in event.admissions if isinstance(event, Admitted) else ():
                for name in one.feedback:
                    found.setdefault(name, []).append(one)
        return found

    async def decided(self) -> set[str]:
        """Return the items with a final status."""
        found = await self.bus.read(subjects.DECISIONS, subjects.decisions(self.job))
        statuses = [status for message in found for status in unpack(message.data, StatusBatch)[0].items]
        return {status.feedback for status in statuses if status.status not in UNDECIDED}

    async def groups(self) -> list[int]:
        """Return the ordinals of groups that can be trained on."""
        found = await self.bus.read(subjects.EXPERIENCE, subjects.experience(self.job), headers_only=True)
        headers = [parse_group_header(message.headers) for message in found]
        return [header.draw.ordinal for header in headers if header.lengths]

    async def until(self, ask: Callable[[], Any], what: Callable[[Any], bool]) -> Any:
        """Call ``ask`` until ``what`` accepts its result; return that result."""
        async with asyncio.timeout(DEADLINE_S):
            while not what(found := await ask()):
                await asyncio.sleep(0.02)
        return found

    async def admitted(self, items: Sequence[Feedback]) -> dict[str, list[Admission]]:
        names = {item.id for item in items}
        found: dict[str, list[Admission]] = await self.until(self.admissions, lambda found: names <= found.keys())
        return found


@pytest.fixture
async def scene(bus: Bus, tmp_path: Path) -> Scene:
    return Scene(bus, await JobStore(bus).create(CONFIG), tmp_path)


@asynccontextmanager
async def commands(scene: Scene) -> AsyncIterator[list[Command]]:
    """Receive the commands of the leader, as a trainer does; yield the list of them."""
    received: list[Command] = []

    async def receive(data: bytes) -> bytes:
        received.append(unpack(data, Command)[0])
        return pack(Ack(ok=True), job=scene.job)

    server = await scene.bus.serve(subjects.command(scene.job), receive)
    try:
        yield received
    finally:
        await server.close()


@pytest.mark.parametrize("batch", ["refused", "trained", "trained, and its records made room"])
async def test_a_deletion_takes_no_group_that_a_trainer_may_ask_for(scene: Scene, batch: str) -> None:
    """Groups of a sealed batch, or of a trained one without a later checkpoint, stay until the ledger releases them."""
    items = [scene.posted(user) for user in ("gone", "other")]
    await scene.post(*items)
    async with scene.worker(), scene.leader(), commands(scene) as received:
        await scene.until(scene.events, lambda found: any(isinstance(event, BatchSealed) for event in found))
        ordinals = {name: one[0].ordinal for name, one in (await scene.admitted(items)).items()}
        mine, other = ordinals[items[0].id], ordinals[items[1].id]
        if batch != "refused":
            await scene.report(kind="trained", batch=1, revision=1, version=1, digest="w1")
        if batch == "trained, and its records made room":
            await scene.bus.purge(subjects.FEEDBACK, subjects.feedback(scene.job))
        eraser = Eraser(scene.bus, str, released_s=DEADLINE_S)
        deletion = asyncio.create_task(eraser.run(await eraser.begin("gone")))

        async def asked() -> list[Command]:
            return received

        wanted = "leave_out" if batch == "refused" else "checkpoint"
        await scene.until(asked, lambda found: any(command.kind == wanted for command in found))
        assert sorted(await scene.groups()) == sorted(ordinals.values()), "a trainer may ask for them"
        assert not deletion.done()
        if batch == "refused":
            assert next(one.args for one in received if one.kind == "leave_out") == {"draws": [f"{mine}.0"]}
            await scene.report(kind="refused", batch=1, revision=1, bad=[Draw(mine)], reason="their data is deleted")
        else:
            await scene.report(kind="checkpointed", batch=1, version=1, digest="w1", path="c1")
        await deletion
        found = await scene.events()
        assert await scene.until(scene.groups, lambda found: mine not in found) in ([other], [])
    dropped = [(one.reason, one.draws, one.redraw) for one in found if isinstance(one, Dropped)]
    assert dropped == ([("erased", [Draw(mine)], False)] if batch == "refused" else [])
    assert not await scene.bus.read(subjects.DEAD, subjects.dead(scene.job)), "no copy of it is stored"


@pytest.mark.long
async def test_new_data_of_a_deleted_user_delays_no_deletion_and_stays(scene: Scene) -> None:
    items = [scene.posted(user) for user in ("gone", "other")]
    await scene.post(*items)
    async with scene.worker(), scene.leader(), commands(scene) as received:
        await scene.until(scene.events, lambda found: any(isinstance(event, BatchSealed) for event in found))
        await scene.report(kind="trained", batch=1, revision=1, version=1, digest="w1")
        eraser = Eraser(scene.bus, str, released_s=DEADLINE_S)
        deletion = asyncio.create_task(eraser.run(await eraser.begin("gone")))

        async def asked() -> list[Command]:
            return received

        await scene.until(asked, lambda found: any(command.kind == "checkpoint" for command in found))
        again = scene.posted("gone", version=1)
        await scene.post(again)
        later = (await scene.admitted([again]))[again.id][0].ordinal
        await scene.until(scene.groups, lambda found: later in found)
        await scene.report(kind="checkpointed", batch=1, version=1, digest="w1", path="c1")
        async with asyncio.timeout(DEADLINE_S / 2):
            await deletion
        assert later in await scene.groups()
        assert not any(isinstance(event, Dropped) for event in await scene.events())


async def test_a_damaged_checkpoint_after_a_deletion_forks_with_reason_erased(scene: Scene) -> None:
    """The damaged checkpoint covers a batch with deleted inputs, which an older checkpoint cannot repeat."""
    items = [scene.posted(user) for user in ("gone", "other")]

    async def found(kind: type[Event]) -> list[Any]:
        return [event for event in await scene.events() if isinstance(event, kind)]

    async with scene.worker(), scene.leader(reports_version=False):
        async with scene.trainer():
            await scene.until(partial(found, Checkpointed), bool)
            await scene.post(*items)
            await scene.until(partial(found, BatchTrained), bool)
            mine = (await scene.admitted(items))[items[0].id][0].ordinal
            eraser = Eraser(scene.bus, str, released_s=DEADLINE_S)
            await eraser.run(await eraser.begin("gone"))
            assert mine not in await scene.groups()
            assert not await found(LineageForked), "a deletion alone causes no fork"
        newest = (await found(Checkpointed))[-1]
        assert (newest.number, newest.reason) == (1, "deletion of a user's data")
        weights = checkpoint_path(scene._dir, newest.path) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        async with scene.trainer():
            [fork] = await scene.until(partial(found, LineageForked), bool)
            more = [scene.posted(user, fork.version) for user in ("third", "fourth")]
            await scene.post(*more)
            await scene.until(partial(found, BatchTrained), lambda trained: len(trained) > 1)
    assert fork.from_batch == 1
    assert fork.reason.startswith(f"erased: the data behind draws {mine}.0 of batch 1 was deleted")
    entries = [decode_events(m.data) for m in await scene.bus.read(subjects.LEDGER, subjects.ledger(scene.job))]
    [decision] = [entry for entry in entries if fork in entry]
    dropped = [(one.reason, one.draws, one.redraw) for one in decision if isinstance(one, Dropped)]
    assert dropped == [("erased", [Draw(mine, 1)], False)], "the decision that forks contains the drop"


async def test_a_job_that_releases_nothing_delays_no_other_job(scene: Scene) -> None:
    """One job has no leader, so it releases nothing; the deletion still removes the data of the other job."""
    other = Scene(scene.bus, await JobStore(scene.bus).create(CONFIG), scene._dir)
    base: dict[str, Any] = {"writer_epoch": 1, "time": 1.0}
    admission = Admission(0, {new_marked_id(scene.job): 1}, {}, 1.0, 0, "k", "gone", "default", 1.0)
    admitted = Admitted(**base, admissions=[admission], low_interactions=1, low_feedback=1)
    dropped = Dropped(**base, draws=[Draw(0)], reason="erased", lengths=[0], redraw=False, min_version=0, deadline=0.0)
    header = GroupHeader(
        draw=Draw(0), attempt="a", epoch=1, digest="d", nbytes=9, prompt_tokens=1, lengths=[1], rewards=[0.0],
        failed=[False], truncated=[False], finite=True, min_version=0, max_version=0, worker="w",
    )  # fmt: skip
    for one in (scene, other):
        await scene.bus.publish(subjects.ledger(one.job), encode_events([admitted]))
        await scene.bus.publish(subjects.experience(one.job), b"group", headers=group_headers(header))
    eraser = Eraser(scene.bus, str, released_s=2 * DEADLINE_S)
    report = await eraser.begin("gone")
    deletion = asyncio.create_task(eraser.run(report))
    await scene.bus.publish(subjects.ledger(other.job), encode_events([dropped]))
    await scene.until(other.groups, lambda found: not found)
    assert await scene.groups() == [0]
    assert not deletion.done()
    await scene.bus.publish(subjects.ledger(scene.job), encode_events([dropped]))
    await deletion
    assert (report.status, report.groups, await scene.groups()) == ("done", 2, [])


async def erase(bus: Bus, user: str) -> None:
    eraser = Eraser(bus, str)
    await eraser.run(await eraser.begin(user))


async def test_admitted_items_of_other_users_keep_their_body(scene: Scene) -> None:
    """The message with the items is split twice before their groups are created."""
    items = [scene.posted(user) for user in ("gone", "too", "other")]
    await scene.post(*items)
    async with scene.leader():
        ordinals = {name: one[0].ordinal for name, one in (await scene.admitted(items)).items()}
        await erase(scene.bus, "gone")
        await erase(scene.bus, "too")
        (copy,) = await scene.bus.read(subjects.FEEDBACK, subjects.feedback(scene.job))
        assert copy.headers[RESTORED_HEADER].split()[0] == "1"
        async with scene.worker():
            mine = ordinals[items[2].id]
            assert await scene.until(scene.groups, lambda found: mine in found) == [mine]


async def test_items_admitted_during_a_deletion_keep_their_body(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader admits items after the deletion has read the ledger, and before it stores the remaining items anew."""
    items = [scene.posted(user) for user in ("gone", "other", "another")]
    await scene.post(*items)

    async def admitted_items() -> set[str]:
        found = await scene.bus.read(subjects.DECISIONS, subjects.decisions(scene.job))
        statuses = [status for message in found for status in unpack(message.data, StatusBatch)[0].items]
        return {status.feedback for status in statuses if status.status == "admitted"}

    async with AsyncExitStack() as leaders:

        def then_admit(read: Callable[..., Any]) -> Callable[..., Any]:
            async def reads(*args: Any) -> Any:
                found = await read(*args)
                if not await admitted_items():
                    await leaders.enter_async_context(scene.leader())
                    await scene.until(admitted_items, lambda found: found >= {item.id for item in items[1:]})
                return found

            return reads

        monkeypatch.setattr(Eraser, "_lineages", then_admit(Eraser._lineages))
        await erase(scene.bus, "gone")
        mine = {one[0].ordinal for one in (await scene.admitted(items[1:])).values()}
        async with scene.worker():
            assert mine <= {*await scene.until(scene.groups, lambda found: mine <= {*found})}


@pytest.mark.parametrize("later", ["the same leader", "another leader"])
async def test_items_admitted_while_they_are_stored_anew_count_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """The deletion reads the ledger before any admission, the items are trained, and the deletion stores them anew."""
    items = [scene.posted(user) for user in ("gone", "other", "another")]
    waits = Feedback(
        id=new_marked_id(scene.job), job=scene.job, kind="metric", key_id="k", received=time.time(),
        inference=new_marked_id(scene.job), metric="reward", value=1.0,
    )  # fmt: skip
    await scene.post(*items)
    await scene.post(waits)  # keeps the start position between the original message and its copy
    made = Eraser._lineages
    async with AsyncExitStack() as leaders, scene.worker():

        async def train_first(self: Eraser, *args: Any) -> Any:
            found = await made(self, *args)
            await leaders.enter_async_context(scene.leader())
            await scene.until(scene.events, lambda found: any(isinstance(event, BatchSealed) for event in found))
            await scene.report(kind="trained", batch=1, revision=1, version=1, digest="w1")
            await scene.report(kind="checkpointed", batch=1, version=1, digest="w1", path="c1")
            behind = scene.posted("behind")
            await scene.post(behind)
            await scene.admitted([behind])
            if later == "another leader":
                await leaders.aclose()
            return found

        monkeypatch.setattr(Eraser, "_lineages", train_first)
        await erase(scene.bus, "gone")
        messages = await scene.bus.read(subjects.FEEDBACK, subjects.feedback(scene.job))
        assert [RESTORED_HEADER in message.headers for message in messages] == [False, False, True]
        if later == "another leader":
            await leaders.enter_async_context(scene.leader())
        last = scene.posted("last")
        await scene.post(last)
        found = await scene.admitted([last])
    assert [len(found[item.id]) for item in items[1:]] == [1, 1]


async def test_a_new_leader_checks_items_stored_anew_against_the_ledger(scene: Scene) -> None:
    """The leader reads from its start position; the folded state no longer names items that were trained before it."""
    known, new = (scene.posted(user) for user in ("other", "another"))
    base: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
    state = LedgerState()
    one = Admission(0, {}, {known.id: 1}, 1.0, 0, "trusted", "other", "posted", 0.0)
    entry = [
        JobStarted(**base, config_digest="c", settings={}),
        Checkpointed(**base, number=0, version=0, digest="w0", path="c", trainer_epoch=1, low_seq=0),
        Drawn(**base, start=0, stop=1, min_version=0, deadline=time.time() + 60),
        Admitted(**base, low_interactions=1, low_feedback=2, admissions=[one]),
        Dropped(**base, draws=[Draw(0)], reason="failed", lengths=[0], redraw=False, min_version=0, deadline=0.0),
    ]  # fmt: skip
    for event in entry:
        state.apply(event)
    state.admissions.clear()  # a later checkpoint covers it
    await scene.bus.publish(subjects.ledger(scene.job), encode_events(entry))
    copy = pack(FeedbackBatch(items=[known, new]), job=scene.job)
    await scene.bus.publish(subjects.feedback(scene.job), copy, headers={RESTORED_HEADER: "1"})
    await scene.post(new)
    supply = LiveSupply(scene.bus, scene.job, CONFIG, epoch=2)
    state.read_from = (1, 1)
    await supply.recover(state)
    assert list(supply.matching.examples.ready) == [new.id]


@pytest.mark.parametrize("is_decided", [False, True])
async def test_an_early_retraction_that_was_stored_anew_still_retracts(scene: Scene, is_decided: bool) -> None:
    """The status ``retracted`` does not prove that the retraction has met its item."""
    item = scene.posted("other")
    retraction = Feedback(
        id=new_marked_id(scene.job), job=scene.job, kind="retraction", key_id="trusted", received=time.time(),
        body={"feedback": item.id},
    )  # fmt: skip
    statuses = [FeedbackStatus(feedback=retraction.id, status="retracted", reason=f"retracts {item.id}", time=1.0)]
    if is_decided:
        statuses.append(FeedbackStatus(feedback=item.id, status="rejected", reason="stale", time=1.0))
    await record_decided(scene.bus, scene.job, *statuses)
    copy = pack(FeedbackBatch(items=[retraction]), job=scene.job)
    await scene.bus.publish(subjects.feedback(scene.job), copy, headers={RESTORED_HEADER: "1"})
    if not is_decided:
        await scene.post(item)
    supply = LiveSupply(scene.bus, scene.job, CONFIG, epoch=2)
    await supply.recover(LedgerState())
    assert list(supply.matching.examples.ready) == []
    assert supply.matching.has_feedback(retraction.id) is not is_decided


STEPS = frozenset({"publish", "publish_whole", "delete_message", "get_whole", "get_many", "stream_state", "last"})


class Killed:
    """Bus for an eraser that is killed at step ``at``: after that step if ``behind``, else before it."""

    def __init__(self, bus: Bus, at: int, *, behind: bool) -> None:
        self._bus, self._left, self._behind = bus, at, behind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bus, name)
        return partial(self._step, found) if name in STEPS else found

    async def _step(self, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._behind:
            raise Unavailable("killed")
        found = await do(*args, **options)
        if self._left == 0:
            raise Unavailable("killed")
        return found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
async def test_a_deletion_that_is_killed_again_and_again_loses_nothing_of_others(scene: Scene, seed: int) -> None:
    """Meanwhile items are posted and admitted, and leaders change; undecided items stay above the start position."""
    chance, others, gone = random.Random(seed), list[Feedback](), list[Feedback]()

    async def post(*users: str) -> None:
        some = [scene.posted(chance.choice(users)) for _ in range(chance.randint(2, 4))]
        others.extend(item for item in some if item.user != "gone")
        gone.extend(item for item in some if item.user == "gone")
        await scene.post(*some)

    report = await Eraser(scene.bus, str).begin("gone")
    async with scene.worker():
        for _ in range(4):
            async with scene.leader():
                for _ in range(3):
                    await post("gone", "a", "b")
                for _ in range(4):
                    killed: Any = Killed(scene.bus, chance.randint(1, 25), behind=chance.random() < 0.5)
                    with suppress(Unavailable):
                        await Eraser(killed, str).run(report)
                    await post("a", "b", "c")
        await Eraser(scene.bus, str).run(report)
        async with scene.leader():  # reads everything anew
            await scene.until(scene.groups, bool)
    admitted = await scene.admissions()
    kept = await scene.bus.read(subjects.FEEDBACK, subjects.feedback(scene.job))
    places: dict[str, int] = {}
    for message in kept:
        places |= {item.id: message.seq for item in unpack(message.data, FeedbackBatch)[0].items}
    ids = await scene.bus.read(subjects.FEEDBACK, subjects.feedback_ids(scene.job))
    known = {item.id for message in ids for _, item in unpack(message.data, FeedbackIds)[0].items(scene.job)}
    decided = await scene.decided()
    mark = max(event.low_feedback for event in await scene.events() if isinstance(event, Admitted))
    for item in others:
        assert item.id in places or item.id in known, "the item can be found"
        assert len(admitted.get(item.id, ())) <= 1
        assert item.id in decided | admitted.keys() or places.get(item.id, 0) >= mark, (
            "an undecided item stays above the start position"
        )
    erased = await scene.bus.read(subjects.FEEDBACK, subjects.erasures(scene.job))
    named = {id for message in erased for id in unpack(message.data, Erasure)[0].feedback}
    assert {item.id for item in gone} <= named
    assert not places.keys() & named
