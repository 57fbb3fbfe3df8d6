"""``penstock demo online``: a live agent judges the answers of a small policy, which learns from the feedback.

With ``--hostile``, an attacker sends nine tenths of the traffic with one key, and inverts every verdict. The policy
still learns, because the job bounds the share of each key in a batch.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli.demo.agent import WINDOW, Agent, agent_clients, demonstrations, sdk
from penstock.cli.deployment.machine import ready_with_progress
from penstock.cli.jobs.audit import equation
from penstock.cli.printing import console, note, show_json
from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ConfigError

__all__ = ["GOAL", "LIMIT_S", "START", "Shown", "load_online_job", "run_online", "summary", "tell_online"]

GOAL, START = 0.8, 0.35
LIMIT_S = 240.0
"""Default maximum duration of a run (seconds)."""
TALKERS = 48
"""Number of concurrent requests of the agent in a run without a hostile key."""
CUSTOMERS, HOSTILE_TALKERS = 8, 80
"""In a run with a hostile key: number of customers, and number of concurrent requests with the hostile key. The agent
acts for all customers: each has its own key, and one request at a time."""
SHARE = 0.15
"""In a run with a hostile key: largest share that one key may have of a batch."""
SCOPES = ("inference:write", "feedback:write")
ROW_S = 5.0
COLUMNS = {"seconds": 8, "answers": 9, "version": 9, "accepted": 10, "feedback": 10, "late": 6, "twice": 7, "failed": 8}
HOSTILE_COLUMN = "hostile"


@dataclass(frozen=True)
class Shown:
    """Outcome of a run of the demo.

    ``rate`` is the share of accepted answers at the end; ``report`` is the audit of the job. ``trained``:
    number of trained feedback items that the hostile key posted (True), and that other keys posted (False).
    """

    agent: Agent
    hostile: Agent | None
    rate: float
    began: float
    seconds: float
    report: dict[str, Any]
    trained: dict[bool, int]

    @property
    def learnt(self) -> bool:
        """True if the share of accepted answers was at most START at first, and at least GOAL at the end."""
        return self.agent.start <= START and self.rate >= GOAL

    @property
    def failures(self) -> list[str]:
        """Errors of the failed requests of all agents."""
        return self.agent.failures + (self.hostile.failures if self.hostile is not None else [])

    @property
    def traffic(self) -> float:
        """Share of all answers that went to the hostile agent."""
        hostile = len(self.hostile.answers) if self.hostile is not None else 0
        return hostile / max(1, hostile + len(self.agent.answers))

    @property
    def influence(self) -> float:
        """Share of the trained feedback that the hostile agent posted."""
        return self.trained[True] / max(1, sum(self.trained.values()))

    @property
    def code(self) -> int:
        """Exit code of the demo."""
        return 0 if self.learnt and self.report["ok"] and not self.failures else 1


def load_online_job(file: Path, overrides: Sequence[str], directory: Path, *, hostile: bool = False) -> OnlineJob:
    """Load a job file, with the demonstrations of this demo (written to ``directory``) as its warm-start data.

    With ``hostile``, also bound the share of each key in a batch, unless the job file sets another bound.
    Raises ConfigError for a job of another kind.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "demonstrations.jsonl"
    demonstrations(path)
    spec = load_yaml(file)
    spec["warm_start"] = {**spec.get("warm_start", {}), "data": [{"type": "file", "path": str(path)}]}
    if hostile:
        shares = {"max_share_per_key": SHARE, "max_share_per_asker": SHARE}
        spec["online"] = {**shares, **spec.get("online", {})}
    job = parse_job(with_overrides(spec, overrides), where=str(file))
    if not isinstance(job, OnlineJob):
        raise ConfigError(f"{file}: kind: the online demo needs 'online_rl', found '{job.kind}'")
    return job


async def run_online(
    job: OnlineJob, options: StackOptions, *, hostile: bool = False, limit_s: float = LIMIT_S,
    screen: Console | None = None,
) -> Shown:  # fmt: skip
    """Start a deployment, run the agents until the policy has learned or time is up, end the job and audit it.

    Progress is printed as a table to ``screen``, by default standard output. Raises ConfigError if OpenAI's SDK is not
    installed, the job fails, no version is served in time, or a service cannot continue.
    """
    sdk()  # fail before anything is started
    began = time.monotonic()
    note(f"starting NATS, Valkey and the services in {options.data_dir}")
    async with Stack(options, note) as stack:
        await ready_with_progress(stack)
        note(f"{time.monotonic() - began:6.1f} s  ready at {stack.url}")
        async with AsyncClient(stack.url, api_key=stack.api_key) as client:
            record = await client.submit(job)
            note(f"submitted {record.id}; any OpenAI client may talk to model '{job.name}' at {stack.url}/v1")
            await _served(client, record.id, deadline=began + limit_s)
            async with _agents(client, stack, job, hostile=hostile) as (agent, other, enemy):
                note(
                    f"{time.monotonic() - began:6.1f} s  version 0 is served; OpenAI's SDK {sdk().__version__} asks it"
                )
                rate = await _watch(agent, other, stack, began=began, limit_s=limit_s, screen=screen or console())
            await client.cancel(record.id)
            await client.wait(record.id, timeout_s=60.0)  # it checkpoints its updates first, so the ledger balances
            report = await client.audit(record.id)
            trained = await _trained(client, record.id, enemy)
    return Shown(agent, other, rate, began, time.monotonic() - began, report, trained)


@asynccontextmanager
async def _agents(
    client: AsyncClient, deployment: Stack, job: OnlineJob, *, hostile: bool
) -> AsyncIterator[tuple[Agent, Agent | None, str]]:
    """Yield ``(agent, hostile agent, id of the hostile agent's key)``. Unless ``hostile``, yield ``(agent, None, '')``.

    Without a hostile agent, the agent uses the deployment's key. Otherwise it uses one key for each of its customers.
    """
    rng, url = random.Random(job.seed), deployment.url
    if not hostile:
        async with agent_clients(url, job.name, [deployment.api_key], each=TALKERS) as alone:
            yield Agent(alone, rng), None, ""
        return
    customers = [await client.keys.create(f"customer-{number}", SCOPES) for number in range(CUSTOMERS)]
    enemy = await client.keys.create("hostile", SCOPES)
    async with (
        agent_clients(url, job.name, [customer.key for customer in customers]) as good,
        agent_clients(url, job.name, [enemy.key], each=HOSTILE_TALKERS) as bad,
    ):
        yield Agent(good, rng), Agent(bad, random.Random(job.seed + 1), honest=False), enemy.id


async def _served(client: AsyncClient, job: str, *, deadline: float) -> None:
    """Wait until a rollout worker serves a version of the job's policy.

    Raises ConfigError if the job fails, or if no version is served before ``deadline`` (monotonic seconds).
    """
    while time.monotonic() < deadline:
        record = await client.get(job)
        if record.status.phase == "failed":
            raise ConfigError(f"the job failed: {record.status.message}")
        if any(row["service"] == "rollout" and row.get("version", -1) >= 0 for row in await client.workers(job)):
            return
        await asyncio.sleep(0.2)
    raise ConfigError("no version was served in time; see: penstock why")


async def _watch(
    agent: Agent, hostile: Agent | None, stack: Stack, *, began: float, limit_s: float, screen: Console
) -> float:
    """Run the agents and print progress until the goal is reached or time is up; return the agent's last ``rate``.

    Raises ConfigError if a service cannot continue.
    """
    both = [agent] if hostile is None else [agent, hostile]
    tasks = [asyncio.create_task(one.run()) for one in both]
    broken = asyncio.create_task(stack.broken())
    columns = COLUMNS if hostile is None else {**COLUMNS, HOSTILE_COLUMN: 9}
    screen.print("".join(f"{name:>{width}}" for name, width in columns.items()))
    try:
        while not _done(agent, began, limit_s):
            await asyncio.wait({*tasks, broken}, timeout=ROW_S, return_when=asyncio.FIRST_COMPLETED)
            cells = _row(agent, hostile, time.monotonic() - began)
            screen.print("".join(f"{value:>{width}}" for value, width in zip(cells, columns.values(), strict=True)))
            if broken.done():
                await broken
        rate = agent.rate
        for one in both:
            one.stopped.set()
        await asyncio.gather(*tasks)
        return rate
    finally:
        for task in (*tasks, broken):
            task.cancel()
        await asyncio.gather(*tasks, broken, return_exceptions=True)


def _row(agent: Agent, hostile: Agent | None, seconds: float) -> list[str]:
    failed = len(agent.failures) + (len(hostile.failures) if hostile is not None else 0)
    shown = [
        f"{seconds:.1f}", len(agent.answers), agent.version, f"{agent.rate:.2f}", agent.posted, agent.late, agent.twice,
        failed,
    ]  # fmt: skip
    return [str(cell) for cell in (shown if hostile is None else [*shown, len(hostile.answers)])]


def _done(agent: Agent, began: float, limit_s: float) -> bool:
    learnt = len(agent.answers) >= 2 * WINDOW and agent.rate >= GOAL
    return learnt or time.monotonic() - began > limit_s


async def _trained(client: AsyncClient, job: str, enemy: str) -> dict[bool, int]:
    """Count the feedback items that were trained on. Return ``{True: a, False: b}``: ``a`` items were posted with the
    API key ``enemy``, ``b`` items with other keys."""
    found = {True: 0, False: 0}
    for row in (await client.funnel(job)).data:
        if row.status == "trained":
            found[row.source == enemy] += row.items
    return found


def summary(shown: Shown, data_dir: Path) -> list[str]:
    """Return the closing text of the demo."""
    agent, report = shown.agent, shown.report
    said = f"{agent.late} late, {agent.twice} twice, {agent.corrected} corrected out of order"
    lines = [
        "",
        f"{'it learnt' if shown.learnt else 'IT DID NOT LEARN'}: accepted {agent.start:.2f} of the first {WINDOW} "
        f"answers, {shown.rate:.2f} of the last {WINDOW}, {shown.seconds:.0f} s in all",
        f"  answers         {len(agent.answers)} by {agent.version + 1} versions; {len(shown.failures)} failures",
        f"  feedback        {agent.posted} posted: {said}",
    ]
    if shown.hostile is not None:
        lines.append(
            f"  hostile key     {shown.traffic:.0%} of all answers, each judged the wrong way round; "
            f"{shown.influence:.0%} of the feedback that was trained on"
        )
    lines += [
        f"  trajectories    {equation(report['equation'])}",
        f"  audit           {'passed' if report['ok'] else 'FAILED: ' + '; '.join(report['violations'][:3])}",
        f"  logs            {data_dir / 'logs'}",
    ]
    return lines + [f"  failure         {text}" for text in shown.failures[:3]]


def tell_online(shown: Shown, data_dir: Path, *, as_json: bool) -> None:
    """Print the summary to standard output, and reasons for a failed run to stderr."""
    if as_json:
        show_json(_plain(shown, data_dir))
    else:
        for line in summary(shown, data_dir):
            console().print(line, soft_wrap=True)
    if not shown.learnt:
        wanted = f"at most {START:g} of the first {WINDOW} answers accepted, at least {GOAL:g} of the last {WINDOW}"
        note(f"error: the goal was missed: {wanted}; it was {shown.agent.start:.2f} and {shown.rate:.2f}")
    if shown.failures:
        note(f"error: {len(shown.failures)} requests failed, the first one: {shown.failures[0]}")


def _plain(shown: Shown, data_dir: Path) -> dict[str, Any]:
    agent, report = shown.agent, shown.report
    counts = {"posted": agent.posted, "late": agent.late, "twice": agent.twice, "corrected": agent.corrected}
    found = {
        "ok": shown.code == 0,
        "accepted": {
            "first": agent.start, "last": shown.rate, "answers": WINDOW, "start": START, "goal": GOAL,
            "reached": shown.learnt,
        },
        "answers": len(agent.answers),
        "version": agent.version,
        "feedback": counts,
        "failures": shown.failures,
        "seconds": round(shown.seconds, 1),
        "equation": report["equation"],
        "audit": report["ok"],
        "data_dir": str(data_dir),
    }  # fmt: skip
    if shown.hostile is not None:
        found["hostile"] = {"traffic": shown.traffic, "influence": shown.influence}
    return found
