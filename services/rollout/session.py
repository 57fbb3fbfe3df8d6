"""One job on one rollout worker: engine, policy, prompts, and tickets in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from penstock.services.rollout.candidate import Candidate
from penstock.services.rollout.commit_rule import Attempt, CommitRule
from penstock.services.rollout.conversations.asking import Asking
from penstock.services.rollout.engines import Engine, lacks_engine, open_job_engine, start_engine
from penstock.services.rollout.env_requests import EnvRequests
from penstock.services.rollout.episode import failed_group, skipped_group
from penstock.services.rollout.group_maker import GroupMaker, room_for
from penstock.services.rollout.held_weights import WeightRing
from penstock.services.rollout.partial import GRACE_S, SAVE_S, PartialGroups
from penstock.services.rollout.policy import PolicyFollower
from penstock.services.rollout.publisher import GroupPublisher
from penstock.services.rollout.serving import InferenceServer
from penstock.services.rollout.tickets import TicketTaker
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.config.rollout import IN_PROCESS
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.prompts import Prompt, PromptSource
from penstock.shared.errors import ConfigError, DataError, ProtocolError
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, pack, unpack
from penstock.shared.protocol.messages import Report, ScoreReply, ScoreRequest, Ticket, row_for
from penstock.shared.protocol.trajectory import Group
from penstock.shared.runtime.tasks import together
from penstock.shared.transport.bus import Bus

__all__ = ["FixedPolicy", "RolloutSession", "ServingSession", "joined", "score_requests"]


TEXT_BYTES = MAX_INLINE_BYTES // 2
"""Maximum text bytes per score request; the rest of a message is for the prompt and its row."""


def score_requests(group: Group) -> list[ScoreRequest]:
    """Return the score requests for all completions of a group, in order."""
    meta, nbytes = group.meta, 0
    chunks: list[list[str]] = [[]]
    for text in meta["completions"]:
        size = len(text.encode())
        if chunks[-1] and nbytes + size > TEXT_BYTES:
            chunks.append([])
            nbytes = 0
        chunks[-1].append(text)
        nbytes += size
    requests, start = [], 0
    for chunk in chunks:
        row = row_for(meta["row"], range(start, start + len(chunk)))
        requests.append(ScoreRequest(prompt=meta["prompt"], completions=chunk, answer=meta["answer"], row=row))
        start += len(chunk)
    return requests


def joined(replies: Sequence[ScoreReply]) -> ScoreReply:
    """Merge the score replies for parts of a group. If a reply lacks a score component, its completions get 0 for that
    component."""
    names = dict.fromkeys(name for reply in replies for name in reply.parts)
    return ScoreReply(
        rewards=[reward for reply in replies for reward in reply.rewards],
        failed=[failed for reply in replies for failed in reply.failed],
        parts={
            name: [x for reply in replies for x in reply.parts.get(name, [0.0] * len(reply.rewards))] for name in names
        },
        errors=[error for reply in replies for error in reply.errors],
    )


class FixedPolicy:
    """Replaces a ``PolicyFollower`` for jobs without training; serves version 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.version = 0

    def status(self) -> dict[str, Any]:
        """Return entries for the heartbeat. The pause of the last weight update is 0, because there are no updates."""
        return {"pause_s": 0.0}

    async def run(self) -> None:
        """Wait until cancelled, then close the engine."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._engine.close()

    async def first(self) -> None:
        """Return at once: version 0 is available from the start."""

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        """Return at once: version 0 is the only version."""
        assert wanted(0), f"an evaluation job has no {what}"


class ServingSession:
    """One deployment on one rollout worker: an engine that only answers live requests."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: ServingJob) -> None:
        self._bus, self._settings, self.job, self.config = bus, settings, job, config
        self._asking = Asking(bus)
        self._engine: Engine | None = None
        self._serving: InferenceServer | None = None
        self._drained = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled, or until the last request is answered after ``drain``.

        A worker without the deployment's engine serves nothing, and reports that in its heartbeats.
        """
        if lacks_engine(self.config.rollout, self._settings):
            what = f"a rollout worker that has the engine '{self.config.rollout.engine}'; this one does not have it"
            self._asking.wait("engine", what, subjects.inference(self.job))
            await self._drained.wait()
            return
        self._asking.wait("model", "the model to be loaded", str(self.config.model.path or "model.config"))
        try:
            self._serving = await asyncio.to_thread(self._load)
            await self._answer(self._serving)
        except ConfigError as error:  # from the model or the engine; tasks raise exception groups
            self._asking.done("model")
            report = pack(Report(kind="failed", epoch=0, reason=str(error)), job=self.job)
            await self._asking.ask(subjects.report(self.job), report, "failure", "the coordinator to take a failure")
            raise

    async def _answer(self, serving: InferenceServer) -> None:
        assert self._engine is not None
        try:
            await start_engine(self._engine, self.config.rollout)
            self._asking.done("model")
            if self._drained.is_set():
                serving.drain()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(_watch(self._engine))
                await serving.run()
                watching.cancel()
        finally:
            await self._engine.close()

    def _load(self) -> InferenceServer:
        config = self.config
        tokenizer = build_tokenizer(config.model)
        self._engine = open_job_engine(config, tokenizer, self._settings)
        return InferenceServer(
            self._bus, self._settings.worker_id, self.job, self._engine, tokenizer, config.sampling,
            max_running=config.placement.max_running, version=lambda: 0, hold_s=config.serving.hold_s,
            template_args=config.serving.chat_template_args,
        )  # fmt: skip

    def drain(self) -> None:
        """Accept no more requests."""
        self._drained.set()
        if self._serving is not None:
            self._serving.drain()

    @property
    def busy(self) -> bool:
        """Return True if requests are in progress."""
        return self._serving is not None and bool(self._serving.num_requests)

    def status(self) -> dict[str, Any]:
        """Return the job's entry in the heartbeat of this worker."""
        oldest, loaded = self._asking.oldest, self._serving is not None
        row: dict[str, Any] = {
            "version": 0 if oldest is None and loaded else -1,
            "running": self._engine.running if self._engine else 0,
            "requests": self._serving.num_requests if self._serving else 0,
            "generated_tokens": self._engine.generated_tokens if self._engine else 0,
        }
        if oldest is not None:
            row |= {"since": oldest[0], "waiting_for": oldest[1], "subject": oldest[2]}
        return row


HEALTH_S = 1.0
"""Interval in seconds of health checks of an engine, whose processes may die while no request runs."""


class RolloutSession:
    """Takes tickets of a job while the engine has free capacity."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: TextJob) -> None:
        self._bus, self._settings, self.job, self.config = bus, settings, job, config
        self._publisher, self._asking = GroupPublisher(bus, job), Asking(bus)
        self._tickets = TicketTaker(
            bus, job, self._asking, answer=self._attempt, give_up=self._give_up, room=self._room,
            progress=self._progress,
        )  # fmt: skip
        limit_s = config.environment.request_timeout_s if config.environment is not None else 0.0
        self._env = EnvRequests(bus, job, limit_s, self._asking.wait, self._asking.done)
        self._engine: Engine | None = None
        self._rule: CommitRule | None = None
        self._partial: PartialGroups | None = None
        self._policy: PolicyFollower | FixedPolicy | None = None
        self._candidate: Candidate | None = None
        self._held = WeightRing(config.online.posted.held_versions if isinstance(config, OnlineJob) else 0)
        self._serving: InferenceServer | None = None
        self._drained = asyncio.Event()
        self._num_written = 0
        """Number of groups that are being scored or published."""
        self.groups = 0

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled, or until the last ticket is done after ``drain``.

        A worker without the job's engine takes no tickets and reports this in its heartbeats.
        """
        if lacks_engine(self.config.rollout, self._settings):
            await self._stand_by(f"that has the engine '{self.config.rollout.engine}'; this one does not have it")
            return
        self._asking.wait("model", "its engine to load the model", subjects.tickets(self.job))
        try:
            await asyncio.to_thread(self._load)
            await self._work()
        except (ConfigError, DataError) as error:  # from the model or the engine; tasks raise exception groups
            self._asking.done("model")
            await self._report_unusable(error)
            if not isinstance(self.config, JobConfig) or isinstance(self.config.rollout, IN_PROCESS):
                raise
            await self._stand_by(f"that can open the engine; here: {error}")

    async def _stand_by(self, other: str) -> None:
        """Wait until drained without taking tickets. Meanwhile, report that the job needs another kind of rollout
        worker, which ``other`` describes."""
        self._asking.wait("engine", f"a rollout worker {other}", subjects.tickets(self.job))
        await self._drained.wait()

    async def _work(self) -> None:
        assert self._engine is not None
        engines = [self._engine] + ([self._candidate.engine] if self._candidate is not None else [])
        try:
            await self._work_with(self._engine)
        finally:  # also if no version arrived
            for engine in engines:
                await engine.close()
            self._held.clear()

    async def _work_with(self, engine: Engine) -> None:
        await start_engine(engine, self.config.rollout)
        self._asking.done("model")
        if isinstance(self.config, JobConfig):
            assert self._rule is not None
            policy = self._policy = PolicyFollower(
                self._bus, self._settings, self.job, engine, held=self._held, leaving=self._rule.interrupt,
                updating=self._rule.update,
            )  # fmt: skip
            if PartialGroups.is_possible(self.config, engine):
                self._partial = PartialGroups(
                    self._bus, self.job, self.config, engine=engine, rule=self._rule, policy=policy
                )
        else:
            self._policy = FixedPolicy(engine)
        async with asyncio.TaskGroup() as tasks:
            running = [self._policy.run(), self._publisher.run(), _watch(engine)]
            if self._partial is not None:
                running += [self._partial.run(), self._hand_over(self._partial)]
            background = [tasks.create_task(one) for one in running]
            if self._candidate is not None:
                background.append(tasks.create_task(self._candidate.run()))
            self._asking.wait("policy", "the first policy version", subjects.MANIFESTS)
            await self._policy.first()
            self._asking.done("policy")
            async with asyncio.TaskGroup() as working:
                if isinstance(self.config, JobConfig):
                    working.create_task(self._serve(self.config))
                await self._tickets.run()
            for task in background:
                task.cancel()

    async def _hand_over(self, partial: PartialGroups) -> None:
        """After ``drain``, hand over to other workers the groups that do not end soon."""
        await self._drained.wait()
        await asyncio.sleep(min(GRACE_S, self._settings.drain_s / 4))
        await partial.hand_over(min(SAVE_S, self._settings.drain_s / 2))

    async def _report_unusable(self, error: Exception) -> None:
        """Report to the coordinator that an evaluation job failed to load: such a job has no trainer to report it."""
        if not isinstance(self.config, JobConfig):
            report = pack(Report(kind="failed", epoch=0, reason=str(error)), job=self.job)
            await self._asking.ask(subjects.report(self.job), report, "model", "the coordinator to take a failure")

    def _load(self) -> None:
        self._tokenizer = build_tokenizer(self.config.model)
        self._source = PromptSource(self.config.data_config, self._tokenizer, self.config.seed)
        self._engine = open_job_engine(self.config, self._tokenizer, self._settings)
        self._rule = CommitRule(
            self.config.rollout, self._engine, wait=self._asking.wait, done=self._asking.done,
            on_open=self._tickets.look_again,
        )  # fmt: skip
        self._maker = GroupMaker(
            self.job, self._settings.worker_id, self.config, self._engine, self._tokenizer,
            on_free=self._tickets.look_again,
        )  # fmt: skip
        if Candidate.is_needed(self.config):
            self._candidate = Candidate(self._bus, self._settings, self.job, self.config, self._tokenizer)

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
        """Use a changed config. Its sampling applies to new live requests only: a ticket keeps the temperature that was
        set when the coordinator drew the ticket's prompt."""
        self.config = config
        if self._serving is not None:
            self._serving.amend(config.sampling)

    def drain(self) -> None:
        """Take no more tickets or requests, and begin no more groups."""
        self._drained.set()
        self._tickets.drain()
        if self._rule is not None:
            self._rule.leave()
        if self._serving is not None:
            self._serving.drain()

    # -- one ticket --------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        if self._rule is not None and not self._rule.is_open:
            return 0  # another worker may begin them at once
        held, config = self._maker.held, self.config
        return room_for(
            rows=config.placement.max_running, completions=config.completions_per_group, held=held.number,
            num_waiting=self._tickets.num_taken - held.num_groups - self._num_written, num_written=self._num_written,
        )  # fmt: skip

    def _progress(self) -> int | None:
        assert self._engine is not None
        engine = self._engine
        paused = getattr(engine, "is_paused", False)  # a user's own engine may lack it
        if paused or not engine.running:
            return None
        return getattr(engine, "progress", engine.generated_tokens)

    async def _attempt(self, ticket: Ticket, key: str) -> None:
        if self._is_measure(ticket):
            await self._evaluate(ticket, key)
        else:
            await self._answer(ticket, key)

    def _is_measure(self, ticket: Ticket) -> bool:
        """Return True if the ticket evaluates a training job's policy, so that only the scores are needed."""
        return ticket.purpose == "eval" and isinstance(self.config, JobConfig)

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
        group = await self._generate(ticket, prompt, key, oldest=ticket.min_version)
        with self._written():
            if not group.num_trajectories:  # the first prompt of its environment is too long
                await self._publisher.publish(group)
                return
            if not self.config.reward.slow:
                group = group.scored(await self._score(group, key))
            await self._publisher.publish(group, raw=self.config.reward.slow)
        self.groups += 1

    async def _evaluate(self, ticket: Ticket, key: str) -> None:
        prompt = self._source.eval(ticket.draw.ordinal)
        rewards, failed, greedy = [0.0], [True], [False]
        if not prompt.too_long:
            group = await self._generate(ticket, prompt, key, oldest=ticket.version or 0)
            if group.num_trajectories:
                with self._written():
                    reply = await self._score(group, key)
                rewards, failed, greedy = reply.rewards, (group.failed | reply.failed).tolist(), group.greedy.tolist()
        await self._tickets.report(ticket, key, rewards, failed=failed, greedy=greedy)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """While the block runs, include one more group in the number of groups that are being scored or published."""
        self._num_written += 1
        try:
            yield
        finally:
            self._num_written -= 1

    async def _give_up(self, ticket: Ticket, key: str, reason: str) -> None:
        if self._is_measure(ticket):
            await self._tickets.report(ticket, key, [0.0], failed=[True], greedy=[False])
            return
        worker = self._settings.worker_id
        group = failed_group(job=self.job, draw=ticket.draw, epoch=ticket.epoch, worker=worker, error=reason)
        await self._publisher.publish(group)

    async def _generate(self, ticket: Ticket, prompt: Prompt, key: str, *, oldest: int) -> Group:
        source = self._candidate if self._is_measure(ticket) else None
        policy, maker = (self._policy, self._maker) if source is None else (source.policy, source.maker)
        assert policy is not None
        assert self._rule is not None
        await self._tickets.reach(policy, ticket, key, oldest=oldest)
        ask = partial(self._env.ask, key)
        if ticket.purpose != "train":  # an evaluation asks for one version, which must not be left behind
            return await maker.make(ticket, prompt, key, ask)

        def generate(attempt: Attempt) -> Coroutine[Any, Any, Group]:
            return maker.make(ticket, prompt, key, ask, attempt=attempt)

        if self._partial is None:
            return await self._rule.make(key, generate)
        return await self._partial.make(
            key, maker.recipe(ticket, prompt), generate, repeated=self._tickets.is_repeated(key), oldest=oldest
        )

    async def _score(self, group: Group, key: str) -> ScoreReply:
        asked = [
            pack(request, job=self.job, id=f"{group.attempt}.{i}") for i, request in enumerate(score_requests(group))
        ]
        answers = (self._asking.ask(subjects.score(self.job), data, key, "a reward worker") for data in asked)
        reply = joined([unpack(data, ScoreReply)[0] for data in await together(answers)])
        if len(reply.rewards) != group.num_trajectories:
            raise ProtocolError(f"{len(reply.rewards)} rewards for {group.num_trajectories} completions")
        return reply

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return True if tickets or requests are in progress."""
        return self._tickets.busy or bool(self._serving and self._serving.num_requests)

    def status(self) -> dict[str, Any]:
        """Return the job's entry in the heartbeat of this worker."""
        engine, policy = self._engine, self._policy
        row = {
            "version": policy.version if policy else -1,
            "running": engine.running if engine else 0,
            "requests": self._serving.num_requests if self._serving else 0,
            "generated_tokens": engine.generated_tokens if engine else 0,
            "groups": self.groups,
            "discarded_tokens": self._rule.discarded_tokens if self._rule else 0,
            "continued_tokens": self._partial.continued_tokens if self._partial else 0,
        } | (policy.status() if policy else {})
        return row | self._tickets.status(self._publisher)


async def _watch(engine: Engine) -> None:
    """Raise Unavailable once the engine can no longer serve, so that the session is opened again with a new engine."""
    while True:
        await asyncio.sleep(HEALTH_S)
        await engine.health()
