"""Scripted agent of the online demo: sends questions to a policy, judges the answers, and posts feedback.

The agent uses only two addresses of Penstock: `/v1`, through OpenAI's SDK, and `/feedback`. Its feedback is as
irregular as in production: some is late, some repeated, and some corrected before the original arrives. A hostile agent
posts the opposite of its verdicts.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.shared.errors import ConfigError

__all__ = [
    "REQUEST_S", "WINDOW", "Agent", "AgentClient", "Answer", "agent_clients", "demonstrations", "question", "sdk",
]  # fmt: skip

ANSWERS = {"bill": "pay", "ship": "send", "code": "dev", "hire": "job"}
"""Topics of the questions, and the answer that the agent accepts for each."""
HABITS = (2, 4, 1, 1)
"""Numbers of demonstrations per question: with the accepted answer, and with the answers to three other topics."""
WINDOW = 200
"""Number of answers over which a share of accepted answers is computed."""
REQUEST_S = 60.0
LATE_S = (0.5, 3.0)
SHARE_LATE, SHARE_TWICE, SHARE_CORRECTED = 0.1, 0.1, 0.05


class AgentClient(Protocol):
    """Client that asks questions and posts feedback with one API key."""

    errors: tuple[type[Exception], ...]
    """Types of the exceptions that failed requests raise."""

    async def ask(self, question: str) -> tuple[str, str, int]:
        """Ask the policy a question; return ``(id of the response, answer, policy version)``."""
        ...

    async def post_feedback(self, feedback: dict[str, Any]) -> bool:
        """Post feedback; return False if a newer revision of it was stored before."""
        ...


class SdkClient:
    """Client on OpenAI's own SDK, with its default connection pool, timeouts and retries."""

    def __init__(self, client: Any, model: str, feedback: str) -> None:
        self.errors: tuple[type[Exception], ...] = (sdk().OpenAIError,)
        self._late = sdk().UnprocessableEntityError
        self._client, self._model, self._feedback = client, model, feedback

    async def ask(self, question: str) -> tuple[str, str, int]:
        found = await self._client.chat.completions.create(
            model=self._model, messages=[{"role": "user", "content": question}]
        )
        return found.id, found.choices[0].message.content or "", int(found.model.rpartition("@")[2])

    async def post_feedback(self, feedback: dict[str, Any]) -> bool:
        try:
            await self._client.post(self._feedback, body=feedback, cast_to=object)
        except self._late:
            return False
        return True


def sdk() -> Any:
    """Import OpenAI's SDK, which only the demo needs. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("openai")
    except ImportError as error:
        raise ConfigError(
            f"the demo's agents talk through OpenAI's SDK, which is missing: pip install 'penstock[demo]' ({error})"
        ) from None


@asynccontextmanager
async def agent_clients(
    url: str, model: str, keys: Sequence[str], *, each: int = 1
) -> AsyncIterator[list[AgentClient]]:
    """Open a client for each API key in ``keys`` ('': no key); yield a list with every client ``each`` times.

    An agent asks one question at a time for each entry of the list.
    """
    async with AsyncExitStack() as stack:
        found: list[AgentClient] = []
        for key in keys:
            made = sdk().AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", timeout=REQUEST_S)
            opened = await stack.enter_async_context(made)
            found += [SdkClient(opened, model, f"{url}/feedback")] * each
        yield found


class Answer(NamedTuple):
    """One judged answer: its time (monotonic seconds), its policy version, and whether it was accepted."""

    time: float
    version: int
    accepted: bool


@dataclass
class Agent:
    """Agent that asks, judges and posts feedback until it is stopped, and counts its actions.

    Args:
        clients: each asks its next question once it has an answer.
        honest: False: the agent posts the opposite of its verdicts.
    """

    clients: Sequence[AgentClient]
    rng: random.Random
    honest: bool = True
    answers: list[Answer] = field(default_factory=list)
    posted: int = 0
    late: int = 0
    twice: int = 0
    corrected: int = 0
    failures: list[str] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rate(self) -> float:
        """Share of accepted answers among the newest WINDOW answers."""
        return _share(self.answers[-WINDOW:])

    @property
    def start(self) -> float:
        """Share of accepted answers among the first WINDOW answers."""
        return _share(self.answers[:WINDOW])

    @property
    def version(self) -> int:
        """Newest policy version among the newest WINDOW answers."""
        return max((answer.version for answer in self.answers[-WINDOW:]), default=0)

    async def run(self) -> None:
        """Run all clients concurrently, until the agent is stopped and all feedback is posted."""
        async with asyncio.TaskGroup() as posting, asyncio.TaskGroup() as asking:
            for client in self.clients:
                asking.create_task(self._converse(client, posting))

    async def _converse(self, client: AgentClient, posting: asyncio.TaskGroup) -> None:
        while not self.stopped.is_set():
            topic = self.rng.choice(list(ANSWERS))
            try:
                name, answer, version = await client.ask(question(topic, self.rng.randrange(100)))
            except client.errors as error:  # counted as a failure of the demo at its end
                self.failures.append(repr(error))
                await asyncio.sleep(0.2)
                continue
            accepted = answer.strip() == ANSWERS[topic]
            self.answers.append(Answer(time.monotonic(), version, accepted))
            said = accepted if self.honest else not accepted
            if self.rng.random() < SHARE_LATE:
                posting.create_task(self._post_late(client, name, said))
            else:
                await self._judge(client, name, said)

    async def _post_late(self, client: AgentClient, name: str, value: bool) -> None:
        self.late += 1
        await asyncio.sleep(self.rng.uniform(*LATE_S))
        await self._judge(client, name, value)

    async def _judge(self, client: AgentClient, name: str, value: bool) -> None:
        """Post a verdict on an answer: usually once, sometimes twice. Sometimes post two verdicts in the wrong order,
        as if the first one were delayed: the corrected verdict, and after it the original, wrong one."""
        body = {"inference_id": name, "metric_name": "accepted", "value": value, "feedback_id": str(uuid.uuid4())}
        chance = self.rng.random()
        if chance < SHARE_TWICE:
            self.twice += 1
            await self._post(client, body)
        elif chance < SHARE_TWICE + SHARE_CORRECTED:
            self.corrected += 1
            await self._post(client, body | {"revision": 1})
            body["value"] = not value  # the original verdict, which arrives last
        await self._post(client, body)

    async def _post(self, client: AgentClient, body: dict[str, Any]) -> None:
        try:
            taken = await client.post_feedback(body)
        except client.errors as error:
            self.failures.append(repr(error))
            return
        if taken or body.get("revision") is None:  # a post that its correction overtook is refused
            self.posted += 1
        else:
            self.failures.append(f"refused: {body}")


def question(topic: str, number: int) -> str:
    """Return the text of a question about ``topic``."""
    return f"{number:02d} {topic}:"


def demonstrations(path: Path) -> None:
    """Write demonstrations of a poor policy to ``path``: eight answers to each question, six of them wrong."""
    words = list(ANSWERS.values())
    rows = [
        {"prompt": question(topic, number), "answer": words[(place + shift) % len(words)]}
        for number in range(100)
        for place, topic in enumerate(ANSWERS)
        for shift, count in enumerate(HABITS)
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _share(answers: Sequence[Answer]) -> float:
    return sum(answer.accepted for answer in answers) / max(1, len(answers))
