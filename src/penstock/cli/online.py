"""``penstock demo online``: a live agent talks to a small policy and judges the answers, and they get better.

The agent knows nothing of Penstock but two addresses: OpenAI's chat completions, and `/feedback`. What it posts is as
untidy as in life: some late, some twice, some corrected before the first word has arrived.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import random
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from rich.console import Console

from penstock.cli.books import equation
from penstock.cli.machine import ready_with_progress
from penstock.cli.printing import console, note
from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.kinds import parse_job
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.errors import ConfigError

__all__ = ["Agent", "demonstrations", "load_online_job", "run_online"]

ANSWERS = {"bill": "pay", "ship": "send", "code": "dev", "hire": "job"}
"""What the agent is asked about, and the answer that it accepts."""
HABITS = (2, 4, 1, 1)
"""How often the demonstrations answer a topic with its own word, and with those of the topics after it."""
GOAL, START = 0.8, 0.35
WINDOW = 200
"""Answers over which a rate is taken."""
TALKERS = 48
"""Requests at once."""
ROW_S = 5.0
COLUMNS = {"seconds": 8, "answers": 9, "version": 9, "accepted": 10, "feedback": 10, "late": 6, "twice": 7, "failed": 8}
REQUEST_S = 60.0
LATE_S = (0.5, 3.0)
SHARE_LATE, SHARE_TWICE, SHARE_CORRECTED = 0.1, 0.1, 0.05


class Talk(Protocol):
    """Asks the policy one question."""

    errors: tuple[type[Exception], ...]
    """What it raises where it gets no answer."""

    async def __call__(self, question: str) -> tuple[str, str, int]:
        """``(id, answer, policy version)``."""
        ...


class PlainTalk:
    """Chat completions by plain HTTP, as any client sends them."""

    errors: tuple[type[Exception], ...] = (httpx.HTTPError,)

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http, self._model = http, model

    async def __call__(self, question: str) -> tuple[str, str, int]:
        body = {"model": self._model, "messages": [{"role": "user", "content": question}]}
        reply = await self._http.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        found = reply.json()
        return found["id"], found["choices"][0]["message"]["content"] or "", int(reply.headers["x-policy-version"])


class SdkTalk:
    """The same through OpenAI's own SDK."""

    def __init__(self, url: str, model: str) -> None:
        sdk: Any = importlib.import_module("openai")
        self.errors: tuple[type[Exception], ...] = (sdk.OpenAIError,)
        self._client = sdk.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_S)
        self._model = model

    async def __call__(self, question: str) -> tuple[str, str, int]:
        raw = await self._client.chat.completions.with_raw_response.create(
            model=self._model, messages=[{"role": "user", "content": question}]
        )
        found = raw.parse()
        return found.id, found.choices[0].message.content or "", int(raw.headers["x-policy-version"])


@dataclass
class Agent:
    """Asks, judges and says so, until it is stopped; counts what happened."""

    talk: Talk
    http: httpx.AsyncClient
    rng: random.Random
    verdicts: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: list[bool] = field(default_factory=list)
    asked: int = 0
    posted: int = 0
    late: int = 0
    twice: int = 0
    corrected: int = 0
    failures: list[str] = field(default_factory=list)
    version: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rate(self) -> float:
        """Share of accepted answers among the newest."""
        return sum(self.verdicts) / max(1, len(self.verdicts))

    @property
    def start(self) -> float:
        """The same among the first."""
        return sum(self.first) / max(1, len(self.first))

    def row(self, seconds: float) -> str:
        """One row of the table."""
        shown = [
            f"{seconds:.1f}", self.asked, self.version, f"{self.rate:.2f}", self.posted, self.late, self.twice,
            len(self.failures),
        ]  # fmt: skip
        return "".join(f"{value:>{width}}" for value, width in zip(shown, COLUMNS.values(), strict=True))

    async def run(self) -> None:
        """Talk with several voices at once; ends once stopped and everything is said."""
        async with asyncio.TaskGroup() as saying, asyncio.TaskGroup() as talking:
            for _ in range(TALKERS):
                talking.create_task(self._converse(saying))

    async def _converse(self, saying: asyncio.TaskGroup) -> None:
        while not self.stopped.is_set():
            topic = self.rng.choice(list(ANSWERS))
            try:
                name, answer, version = await self.talk(question(topic, self.rng.randrange(100)))
            except self.talk.errors as error:  # the demo fails for it in the end
                self.failures.append(repr(error))
                await asyncio.sleep(0.2)
                continue
            accepted = answer.strip() == ANSWERS[topic]
            self.asked += 1
            self.verdicts.append(accepted)
            self.version = max(self.version, version)
            if len(self.first) < WINDOW:
                self.first.append(accepted)
            if self.rng.random() < SHARE_LATE:
                saying.create_task(self._say_late(name, accepted))
            else:
                await self._say(name, accepted)

    async def _say_late(self, name: str, accepted: bool) -> None:
        self.late += 1
        await asyncio.sleep(self.rng.uniform(*LATE_S))
        await self._say(name, accepted)

    async def _say(self, name: str, accepted: bool) -> None:
        """Post the verdict: once, twice, or corrected with the correction first."""
        body = {"inference_id": name, "metric_name": "accepted", "value": accepted, "feedback_id": str(uuid.uuid4())}
        chance = self.rng.random()
        if chance < SHARE_TWICE:
            self.twice += 1
            await self._post(body)
        elif chance < SHARE_TWICE + SHARE_CORRECTED:
            self.corrected += 1
            await self._post(body | {"revision": 1})
            body["value"] = not accepted  # what was said first, and arrives last
        await self._post(body)

    async def _post(self, body: dict[str, Any]) -> None:
        try:
            reply = await self.http.post("/feedback", json=body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        stale = reply.status_code == httpx.codes.UNPROCESSABLE_ENTITY and body.get("revision") is None
        if reply.is_success or stale:  # a word that its correction overtook is refused
            self.posted += 1
        else:
            self.failures.append(f"{reply.status_code}: {reply.text[:200]}")


def question(topic: str, number: int) -> str:
    """What the agent asks."""
    return f"{number:02d} {topic}:"


def demonstrations(path: Path) -> None:
    """A bad example: each question with every word of the task, most often with a wrong one."""
    words = list(ANSWERS.values())
    rows = [
        {"prompt": question(topic, number), "answer": words[(place + shift) % len(words)]}
        for number in range(100)
        for place, topic in enumerate(ANSWERS)
        for shift, count in enumerate(HABITS)
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load_online_job(file: Path, overrides: Sequence[str], directory: Path) -> OnlineJob:
    """The job file with the demonstrations of this demo. Raises ConfigError for a job of another kind."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "demonstrations.jsonl"
    demonstrations(path)
    spec = load_yaml(file)
    spec["warm_start"] = {**spec.get("warm_start", {}), "data": [{"type": "file", "path": str(path)}]}
    job = parse_job(with_overrides(spec, overrides), where=str(file))
    if not isinstance(job, OnlineJob):
        raise ConfigError(f"{file}: kind: the online demo needs 'online_rl', found '{job.kind}'")
    return job


async def run_online(job: OnlineJob, options: StackOptions, *, limit_s: float) -> int:
    """Start everything, let the agent talk until the policy has learnt or time is up; 0 where it has."""
    began, screen = time.monotonic(), console()
    note(f"starting NATS, Valkey and the services in {options.data_dir}")
    async with Stack(options, note) as stack:
        await ready_with_progress(stack)
        note(f"{time.monotonic() - began:6.1f} s  ready at {stack.url}")
        async with AsyncClient(stack.url) as client, httpx.AsyncClient(base_url=stack.url, timeout=REQUEST_S) as http:
            record = await client.submit(job)
            note(f"submitted {record.id}; any OpenAI client may talk to model '{job.name}' at {stack.url}/v1")
            await _served(client, record.id, deadline=began + limit_s)
            sdk = importlib.util.find_spec("openai") is not None
            by = "the OpenAI SDK" if sdk else "httpx"
            note(f"{time.monotonic() - began:6.1f} s  version 0 is served; the agent uses {by}")
            talk: Talk = SdkTalk(stack.url, job.name) if sdk else PlainTalk(http, job.name)
            agent = Agent(talk, http, random.Random(job.seed))
            rate = await _watch(agent, stack, screen, began, limit_s)
            await client.cancel(record.id)
            await _over(client, record.id)
            report = await client.audit(record.id)
        seconds = time.monotonic() - began
    learnt = agent.start <= START and rate >= GOAL
    for line in _summary(agent, rate, report, seconds, options.data_dir, learnt=learnt):
        screen.print(line, soft_wrap=True)
    return 0 if learnt and report["ok"] and not agent.failures else 1


async def _served(client: AsyncClient, job: str, *, deadline: float) -> None:
    """Wait until a rollout worker has a version to serve."""
    while time.monotonic() < deadline:
        record = await client.get(job)
        if record.status.phase == "failed":
            raise ConfigError(f"the job failed: {record.status.message}")
        if any(row["service"] == "rollout" and row.get("version", -1) >= 0 for row in await client.workers(job)):
            return
        await asyncio.sleep(0.2)
    raise ConfigError("no version was served in time; see: penstock why")


async def _watch(agent: Agent, stack: Stack, screen: Console, began: float, limit_s: float) -> float:
    """A row of the table now and then, until the goal is reached, time is up, or a service is broken; the last rate."""
    talking = asyncio.create_task(agent.run())
    broken = asyncio.create_task(stack.broken())
    screen.print("".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    try:
        while not _done(agent, began, limit_s):
            await asyncio.wait({talking, broken}, timeout=ROW_S, return_when=asyncio.FIRST_COMPLETED)
            screen.print(agent.row(time.monotonic() - began))
            if broken.done():
                await broken
        rate = agent.rate
        agent.stopped.set()
        await talking
        return rate
    finally:
        for task in (talking, broken):
            task.cancel()
        await asyncio.gather(talking, broken, return_exceptions=True)


def _done(agent: Agent, began: float, limit_s: float) -> bool:
    learnt = len(agent.verdicts) == WINDOW and agent.asked >= 2 * WINDOW and agent.rate >= GOAL
    return learnt or time.monotonic() - began > limit_s


async def _over(client: AsyncClient, job: str) -> None:
    """Wait until the job has trained and checkpointed what it had, so that the books are closed."""
    await client.wait(job, timeout_s=60.0)


def _summary(
    agent: Agent, rate: float, report: dict[str, Any], seconds: float, data_dir: Path, *, learnt: bool
) -> list[str]:
    verdict = "it learnt" if learnt else "IT DID NOT LEARN"
    said = f"{agent.late} late, {agent.twice} twice, {agent.corrected} corrected out of order"
    lines = [
        "",
        f"{verdict}: accepted {agent.start:.2f} of the first {len(agent.first)} answers, "
        f"{rate:.2f} of the last {len(agent.verdicts)}, {seconds:.0f} s in all",
        f"  answers         {agent.asked} by {agent.version + 1} policy versions; {len(agent.failures)} failures",
        f"  feedback        {agent.posted} posted: {said}",
        f"  trajectories    {equation(report['equation'])}",
        f"  books           {'hold' if report['ok'] else 'DO NOT HOLD: ' + '; '.join(report['violations'][:3])}",
        f"  logs            {data_dir / 'logs'}",
    ]
    return lines + [f"  failure         {text}" for text in agent.failures[:3]]
