"""The scripted agent of the online demo: asks a policy, judges its answers, and says so.

It knows nothing of Penstock but two addresses: OpenAI's chat completions, and `/feedback`. What it posts is as untidy
as in life: some late, some twice, some corrected before the first word has arrived. A hostile one says the opposite of
what it thinks.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx

__all__ = ["REQUEST_S", "WINDOW", "Agent", "Answer", "Voice", "demonstrations", "question", "voices"]

ANSWERS = {"bill": "pay", "ship": "send", "code": "dev", "hire": "job"}
"""What the agent is asked about, and the answer that it accepts."""
HABITS = (2, 4, 1, 1)
"""How often the demonstrations answer a topic with its own word, and with those of the topics after it."""
WINDOW = 200
"""Answers over which a rate is taken."""
REQUEST_S = 60.0
LIMITS = httpx.Limits(keepalive_expiry=2.0)
"""The server drops connections that were idle for 5 s, perhaps just when one is used again."""
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

    def __init__(self, url: str, model: str, key: str) -> None:
        sdk: Any = importlib.import_module("openai")
        self.errors: tuple[type[Exception], ...] = (sdk.OpenAIError,)
        self._client = sdk.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", timeout=REQUEST_S)
        self._model = model

    async def __call__(self, question: str) -> tuple[str, str, int]:
        raw = await self._client.chat.completions.with_raw_response.create(
            model=self._model, messages=[{"role": "user", "content": question}]
        )
        found = raw.parse()
        return found.id, found.choices[0].message.content or "", int(raw.headers["x-policy-version"])


@dataclass(frozen=True)
class Voice:
    """How one API key asks, and posts what was thought of the answer."""

    talk: Talk
    http: httpx.AsyncClient


@asynccontextmanager
async def voices(url: str, model: str, keys: Sequence[str]) -> AsyncIterator[list[Voice]]:
    """A voice for each entry of ``keys`` ('' where none is needed), through the SDK where it is installed."""
    sdk = importlib.util.find_spec("openai") is not None
    async with AsyncExitStack() as stack:
        found = []
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=REQUEST_S, headers=headers, limits=LIMITS)
            )
            found.append(Voice(SdkTalk(url, model, key) if sdk else PlainTalk(http, model), http))
        yield found


class Answer(NamedTuple):
    """One answer that was judged: when (monotonic seconds), by which version, and whether it was accepted."""

    time: float
    version: int
    accepted: bool


@dataclass
class Agent:
    """Asks, judges and says so, until it is stopped; counts what happened.

    Args:
        voices: each asks again once it has an answer.
        honest: whether it says what it thinks, or the opposite.
    """

    voices: Sequence[Voice]
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
        """Share of accepted answers among the newest."""
        return _share(self.answers[-WINDOW:])

    @property
    def start(self) -> float:
        """The same among the first."""
        return _share(self.answers[:WINDOW])

    @property
    def version(self) -> int:
        """Newest policy version that answered."""
        return max((answer.version for answer in self.answers[-WINDOW:]), default=0)

    async def run(self) -> None:
        """Talk with all voices at once; ends once stopped and everything is said."""
        async with asyncio.TaskGroup() as saying, asyncio.TaskGroup() as talking:
            for voice in self.voices:
                talking.create_task(self._converse(voice, saying))

    async def _converse(self, voice: Voice, saying: asyncio.TaskGroup) -> None:
        while not self.stopped.is_set():
            topic = self.rng.choice(list(ANSWERS))
            try:
                name, answer, version = await voice.talk(question(topic, self.rng.randrange(100)))
            except voice.talk.errors as error:  # the demo fails for it in the end
                self.failures.append(repr(error))
                await asyncio.sleep(0.2)
                continue
            accepted = answer.strip() == ANSWERS[topic]
            self.answers.append(Answer(time.monotonic(), version, accepted))
            said = accepted if self.honest else not accepted
            if self.rng.random() < SHARE_LATE:
                saying.create_task(self._say_late(voice, name, said))
            else:
                await self._say(voice, name, said)

    async def _say_late(self, voice: Voice, name: str, value: bool) -> None:
        self.late += 1
        await asyncio.sleep(self.rng.uniform(*LATE_S))
        await self._say(voice, name, value)

    async def _say(self, voice: Voice, name: str, value: bool) -> None:
        """Post the verdict: once, twice, or corrected with the correction first."""
        body = {"inference_id": name, "metric_name": "accepted", "value": value, "feedback_id": str(uuid.uuid4())}
        chance = self.rng.random()
        if chance < SHARE_TWICE:
            self.twice += 1
            await self._post(voice, body)
        elif chance < SHARE_TWICE + SHARE_CORRECTED:
            self.corrected += 1
            await self._post(voice, body | {"revision": 1})
            body["value"] = not value  # what was said first, and arrives last
        await self._post(voice, body)

    async def _post(self, voice: Voice, body: dict[str, Any]) -> None:
        try:
            reply = await voice.http.post("/feedback", json=body)
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


def _share(answers: Sequence[Answer]) -> float:
    return sum(answer.accepted for answer in answers) / max(1, len(answers))
