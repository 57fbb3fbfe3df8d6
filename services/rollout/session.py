"""One job on one rollout worker: engine, policy, prompts, and the tickets in hand."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from penstock.services.rollout.candidate import Candidate
from penstock.services.rollout.engines import Engine, open_engine
from penstock.services.rollout.env_requests import EnvRequests
from penstock.services.rollout.episode import failed_group, skipped_group, with_scores
from penstock.services.rollout.fixed import FixedPolicy
from penstock.services.rollout.group_maker import GroupMaker
from penstock.services.rollout.held_weights import WeightRing
from penstock.services.rollout.policy import PolicyFollower
from penstock.services.rollout.publisher import GroupPublisher
from penstock.services.rollout.scoring import joined, score_requests
from penstock.services.rollout.serving import InferenceServer
from penstock.shared.config.job import JobConfig
from penstock.shared.config.kinds import TextJob
from penstock.shared.config.online import OnlineConfig
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.prompts import Prompt, PromptSource
from penstock.shared.errors import ConfigError, DataError, DeadlineError, ProtocolError, Unavailable
from penstock.shared.models.loading import build_tokenizer, resolve_device
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import EvalResult, Report, ScoreReply, Ticket
from penstock.shared.protocol.trajectory import Group
from penstock.shared.runtime.tasks import together
from penstock.shared.transport.bus import Bus, Delivery

__all__ = ["RolloutSession"]

logger = logging.getLogger(__name__)

ACK_WAIT_S = 5.0
"""A ticket whose holder gives no sign for this long goes to another worker."""
MAX_DELIVER = 5
ASK_DEADLINE_S = 5.0
"""A request is repeated under the same id after this long: its server may be gone, or just slow."""
FETCH_WAIT_S = 1.0
RETRY_S = 0.2
UNREADABLE_PAUSE_S = 0.5
LATE_PAUSE_S = 5.0
"""A ticket that cannot be answered in time comes again after this long, unless the coordinator drops its draw."""


class _LeftBehind(Exception):  # noqa: N818  no error: the coordinator has its answer, or went on without
    """The policy passed the version that a ticket asks for, and versions rise."""


class RolloutSession:
    """Takes tickets of a job while there is room in the engine."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: TextJob) -> None:
        self._bus, self._settings, self.job, self.config = bus, settings, job, config
        self._publisher = GroupPublisher(bus, job)
        limit_s = config.environment.request_timeout_s if config.environment is not None else 0.0
        self._env = EnvRequests(bus, job, limit_s, self._wait, self._done)
        self._waits: dict[str, tuple[float, str, str]] = {}
        self._holds: dict[str, tuple[int, int | None]] = {}
        """Work in hand -> sequence of its ticket, version it asks for."""
        self._ends: dict[str, float] = {}
        """Work in hand -> deadline of its ticket (monotonic)."""
        self._engine: Engine | None = None
        self._policy: PolicyFollower | FixedPolicy | None = None
        self._candidate: Candidate | None = None
        self._held = WeightRing(config.online.posted.held_versions if isinstance(config, OnlineJob) else 0)
        self._serving: InferenceServer | None = None
        self._draining = False
        self.groups = 0

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled, or until ``drain`` and the last ticket in hand is done."""
        try:
            await asyncio.to_thread(self._load)
        except (ConfigError, DataError) as error:
            await self._report_unusable(error)
            raise
        assert self._engine is not None
        engines = [self._engine] + ([self._candidate.engine] if self._candidate is not None else [])
        try:
            await self._work_with(self._engine)
        finally:  # also where no version ever came
            for engine in engines:
                await engine.close()
            self._held.clear()

    async def _work_with(self, engine: Engine) -> None:
        await engine.start()
        if isinstance(self.config, JobConfig):
            self._policy = PolicyFollower(self._bus, self._settings, self.job, engine, held=self._held)
        else:
            self._policy = FixedPolicy(engine)
        slots = asyncio.Semaphore(max(1, self.config.placement.max_running // self.config.completions_per_group))
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._policy.run()), tasks.create_task(self._publisher.run())]
            if self._candidate is not None:
                background.append(tasks.create_task(self._candidate.run()))
            self._wait("policy", "the first policy version", subjects.MANIFESTS)
            await self._policy.first()
            self._done("policy")
            async with asyncio.TaskGroup() as working:
                if isinstance(self.config, JobConfig):
                    working.create_task(self._serve(self.config))
                await self._take_tickets(working, slots)
            for task in background:
                task.cancel()

    async def _report_unusable(self, error: Exception) -> None:
        """An evaluation job has no trainer that would say that its model cannot be loaded."""
        if not isinstance(self.config, JobConfig):
            report = pack(Report(kind="failed", epoch=0, reason=str(error)), job=self.job)
            await self._ask(subjects.report(self.job), report, "model", "the coordinator to take a failure")

    def _load(self) -> None:
        self._tokenizer = build_tokenizer(self.config.model)
        self._source = PromptSource(self.config.data_config, self._tokenizer, self.config.seed)
        self._engine = open_engine(
            self.config.model, self._tokenizer, max_running=self.config.placement.max_running, seed=self.config.seed,
            device=resolve_device(self.config.placement.device),
        )  # fmt: skip
        self._maker = GroupMaker(self.job, self._settings.worker_id, self.config, self._engine, self._tokenizer)
        if Candidate.is_needed(self.config):
            self._candidate = Candidate(self._bus, self._settings, self.job, self.config, self._tokenizer)

    async def _take_tickets(self, working: asyncio.TaskGroup, slots: asyncio.Semaphore) -> None:
        puller = await self._bus.pull(
            subjects.TICKETS, subjects.tickets(self.job), f"rollout-{self.job}",
            ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER, max_ack_pending=4096,
        )  # fmt: skip
        try:
            while not self._draining:
                await slots.acquire()
                room = 1
                while not slots.locked():
                    await slots.acquire()
                    room += 1
                deliveries = await puller.fetch(room, FETCH_WAIT_S)
                for _ in range(room - len(deliveries)):
                    slots.release()
                for delivery in deliveries:
                    task = working.create_task(self._work(delivery))
                    task.add_done_callback(lambda _: slots.release())
        finally:
            await puller.close()

    async def _serve(self, config: JobConfig) -> None:
        """Answer live requests of agents until drained."""
        assert self._engine is not None
        assert self._policy is not None
        policy = self._policy
        online = config.online if isinstance(config, OnlineJob) else OnlineConfig()
        self._serving = InferenceServer(
            self._bus, self._settings.worker_id, self.job, self._engine, self._tokenizer, self.config.sampling,
            max_running=config.placement.max_running, version=lambda: policy.version, hold_s=online.hold_s,
            template_args=config.data.prompt.chat_template_args, forced_sampling=online.forced_sampling,
            redaction=online.redaction, candidate=self._candidate, held=self._held,
        )  # fmt: skip
        if self._candidate is not None:
            self._candidate.on_leave = self._serving.leave_candidate
        await self._serving.run()

    def amend(self, config: TextJob) -> None:
        """The job file changed: live requests follow it; tickets say by themselves what holds for them."""
        self.config = config
        if self._serving is not None:
            self._serving.amend(config.sampling)

    def drain(self) -> None:
        """Take no more tickets and no more requests."""
        self._draining = True
        if self._serving is not None:
            self._serving.drain()

    # -- one ticket --------------------------------------------------------------------------------------------------

    async def _work(self, delivery: Delivery) -> None:
        try:
            ticket, _ = unpack(delivery.data, Ticket)
        except ProtocolError as error:  # given back: after its last delivery it becomes a dead letter
            logger.error("ticket %d is unreadable: %s", delivery.seq, error)
            await delivery.nak(UNREADABLE_PAUSE_S)
            return
        key = f"{ticket.purpose}:{ticket.draw}"
        if key in self._holds:
            seq, version = self._holds[key]
            if delivery.seq != seq and ticket.version == version:  # another leader asked again for what is in hand
                await delivery.ack()
            return  # redelivered while in hand (a stalled process): the first delivery's ack counts
        self._holds[key] = delivery.seq, ticket.version
        left_s, is_late = ticket.left_s(delivery.time), False
        self._ends[key] = time.monotonic() + left_s
        keeper = asyncio.create_task(self._keep(delivery, self._ends[key]))
        try:
            async with asyncio.timeout(left_s):
                await self._attempt(ticket, key)
        except _LeftBehind as error:
            logger.info("ticket %s is over: %s", key, error)
        except (TimeoutError, DeadlineError) as error:
            logger.info("ticket %s is given back: %s", key, str(error) or "past its deadline")
            is_late = True
        finally:
            keeper.cancel()
            self._ends.pop(key, None)
            self._holds.pop(key, None)
            self._done(key)
        if is_late:
            await delivery.nak(LATE_PAUSE_S)  # the coordinator alone drops a draw
        else:
            await delivery.ack()

    async def _attempt(self, ticket: Ticket, key: str) -> None:
        """Answer a ticket. One that cannot be is a failure of its own: its neighbours and the session go on."""
        try:
            if self._is_measure(ticket):
                await self._evaluate(ticket, key)
            else:
                await self._answer(ticket, key)
        except (ConfigError, DataError, ProtocolError) as error:
            logger.error("ticket %s cannot be answered: %s", key, error)
            await self._give_up(ticket, key, str(error))

    def _is_measure(self, ticket: Ticket) -> bool:
        """True if a training job's policy is measured: only the scores are wanted."""
        return ticket.purpose == "eval" and isinstance(self.config, JobConfig)

    async def _keep(self, delivery: Delivery, end: float) -> None:
        """Extend the lease while the engine makes progress or the ticket waits its turn, never past its deadline."""
        assert self._engine is not None
        before = -1
        while time.monotonic() < end:
            await asyncio.sleep(ACK_WAIT_S / 4)
            tokens = self._engine.generated_tokens
            if tokens != before or self._engine.running == 0 or self._waits:
                await delivery.in_progress()
            before = tokens

    async def _answer(self, ticket: Ticket, key: str) -> None:
        ordinal = ticket.draw.ordinal
        prompt = self._source.train(ordinal) if ticket.purpose == "train" else self._source.eval(ordinal)
        if prompt.too_long:
            group = skipped_group(
                job=self.job, draw=ticket.draw, epoch=ticket.epoch, worker=self._settings.worker_id,
                reason="prompt_too_long", prompt=prompt,
            )  # fmt: skip
            await self._publisher.publish(group)
            return
        group = await self._generate(ticket, prompt, key, wanted=lambda version: version >= ticket.min_version)
        if not group.num_trajectories:  # its environment began with a prompt that is too long
            await self._publisher.publish(group)
            return
        if not self.config.reward.slow:
            group = with_scores(group, await self._score(group, key))
        await self._publisher.publish(group, raw=self.config.reward.slow)
        self.groups += 1

    async def _evaluate(self, ticket: Ticket, key: str) -> None:
        prompt = self._source.eval(ticket.draw.ordinal)
        rewards, failed, greedy = [0.0], [True], [False]
        if not prompt.too_long:
            group = await self._generate(ticket, prompt, key, wanted=lambda version: version >= (ticket.version or 0))
            if group.num_trajectories:
                reply = await self._score(group, key)
                rewards, failed, greedy = reply.rewards, (group.failed | reply.failed).tolist(), group.greedy.tolist()
        await self._tell(ticket, key, rewards, failed, greedy)

    async def _give_up(self, ticket: Ticket, key: str, reason: str) -> None:
        if self._is_measure(ticket):
            await self._tell(ticket, key, [0.0], [True], [False])
            return
        worker = self._settings.worker_id
        group = failed_group(job=self.job, draw=ticket.draw, epoch=ticket.epoch, worker=worker, error=reason)
        await self._publisher.publish(group)

    async def _tell(
        self, ticket: Ticket, key: str, rewards: list[float], failed: list[bool], greedy: list[bool]
    ) -> None:
        result = EvalResult(
            version=ticket.version or 0, ordinal=ticket.draw.ordinal, rewards=rewards, failed=failed, greedy=greedy
        )
        data = pack(result, job=self.job, id=key, epoch=ticket.epoch)
        await self._ask(subjects.evaluation(self.job), data, key, "the coordinator to take an evaluation result")

    async def _generate(self, ticket: Ticket, prompt: Prompt, key: str, *, wanted: Any) -> Group:
        """Raises _LeftBehind where the version that a ticket asks for is not there any more."""
        source = self._candidate if self._is_measure(ticket) else None
        policy, maker = (self._policy, self._maker) if source is None else (source.policy, source.maker)
        assert policy is not None
        if not wanted(policy.version):
            self._wait(key, f"policy version {ticket.min_version} (serving {policy.version})", subjects.MANIFESTS)
            left_s = self._ends[key] - time.monotonic()
            await policy.reach(wanted, deadline_s=left_s, what=f"version {ticket.min_version}")
            self._done(key)
        if ticket.version is not None and policy.version > ticket.version:  # versions rise: it will not come again
            raise _LeftBehind(f"version {ticket.version} was left behind for {policy.version}")
        return await maker.make(ticket, prompt, key, partial(self._env.ask, key))

    async def _score(self, group: Group, key: str) -> ScoreReply:
        asked = [
            pack(request, job=self.job, id=f"{group.attempt}.{i}") for i, request in enumerate(score_requests(group))
        ]
        answers = (self._ask(subjects.score(self.job), data, key, "a reward worker") for data in asked)
        reply = joined([unpack(data, ScoreReply)[0] for data in await together(answers)])
        if len(reply.rewards) != group.num_trajectories:
            raise ProtocolError(f"{len(reply.rewards)} rewards for {group.num_trajectories} completions")
        return reply

    async def _ask(self, subject: str, data: bytes, key: str, what: str) -> bytes:
        """Request/reply, again until somebody answers; the ticket's deadline bounds it."""
        while (reply := await self._request(subject, data, key, what, ASK_DEADLINE_S)) is None:
            pass
        return reply

    async def _request(self, subject: str, data: bytes, key: str, what: str, deadline_s: float) -> bytes | None:
        """Ask once; None, after a pause, where nobody answered."""
        try:
            reply = await self._bus.request(subject, data, deadline_s=deadline_s)
        except Unavailable:
            self._wait(key, what, subject)
            await asyncio.sleep(RETRY_S)
            return None
        self._done(key)
        return reply

    # -- what others see ---------------------------------------------------------------------------------------------

    def _wait(self, key: str, what: str, subject: str) -> None:
        self._waits.setdefault(key, (bus_time(), what, subject))

    def _done(self, key: str) -> None:
        self._waits.pop(key, None)

    @property
    def busy(self) -> bool:
        """True if tickets or requests are in hand."""
        return bool(self._holds) or bool(self._serving and self._serving.num_requests)

    def status(self) -> dict[str, Any]:
        """This worker's entry for the job, for its heartbeat."""
        engine, policy = self._engine, self._policy
        row: dict[str, Any] = {
            "version": policy.version if policy else -1,
            "running": engine.running if engine else 0,
            "requests": self._serving.num_requests if self._serving else 0,
            "generated_tokens": engine.generated_tokens if engine else 0,
            "groups": self.groups,
            "holds": [key.split(":", 1)[1] for key in list(self._holds)],
            "pause_s": policy.pause_s if policy else 0.0,
        }
        if self._publisher.blocked is not None:
            since, why = self._publisher.blocked
            row |= {"waiting_for": why, "since": since, "subject": subjects.experience(self.job)}
        elif self._waits:
            since, what, subject = min(self._waits.values())
            row |= {"waiting_for": what, "since": since, "subject": subject}
        return row
