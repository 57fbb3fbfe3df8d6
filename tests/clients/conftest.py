"""Fixtures for clients of other projects: one deployment for all of them, and an interpreter of its own for each.

The policy is the chain of ``tests/contract/serving``: every word has one successor, so a tiny model calls a tool, and
answers once it has the tool's result. Everything else is as for users: processes, keys, an online job that learns.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, TypeVar

import httpx
import pytest

from penstock.client import Client
from penstock.local import Stack, StackOptions, read_state
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import Interaction
from penstock.shared.transport.bus import Bus

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
SHM = Path("/dev/shm")
MODEL, API_KEY = "agent", "clients-key"
READY_S = 90.0
SCRIPT_S = 240.0
"""Limit for a script: some clients take many seconds to import, and more on a busy machine."""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
JOB: dict[str, Any] = {
    "kind": "online_rl",
    "name": MODEL,
    "sampling": {"max_new_tokens": 32},
    "placement": {"max_running": 8},
    "optimizer": {"learning_rate": 1e-7},
    "train": {"batch_size": 2, "max_lag": 8},
    "limits": {"byte_budget": 32 << 20},
    "online": {
        "metrics": {
            "accepted": {"type": "boolean"},
            "score": {"type": "float", "clip": [0.0, 1.0], "default_after_s": 0.1},
            "solved": {"type": "boolean", "level": "episode", "default_after_s": 0.1},
        },
    },
}  # The rate of learning is so small that the policy stays the chain, while its versions go on.


class Deployment:
    """Processes that serve one online job. The event loop runs in a thread, so that tests are plain functions."""

    def __init__(self, directory: Path, save_chain: Callable[[Path], None]) -> None:
        self.model_dir = directory / "model"
        save_chain(self.model_dir)
        (self.model_dir / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
        (directory / "shm").mkdir()
        environment = {
            "PENSTOCK_API_KEYS": API_KEY,
            "PENSTOCK_RATE_LIMIT": "100000/minute",
            "PENSTOCK_SHM_DIR": str(directory / "shm"),
            "PENSTOCK_EXPERIENCE_BYTES": str(80 << 20),
            "PENSTOCK_STREAM_BYTES": str(32 << 20),
        }
        workers = {"rollout": 1, "reward": 0, "env": 0}
        options = StackOptions(data_dir=directory / "data", environment=environment, workers=workers, drain_s=5)
        self._stack = Stack(options)
        self._loop = asyncio.new_event_loop()
        self._closing = ExitStack()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Deployment:
        self._thread.start()
        self._run(self._stack.__aenter__())
        try:
            self._run(self._stack.ready(deadline_s=READY_S))
            self.url = self._stack.url
            self.client = self._closing.enter_context(Client(self.url, api_key=API_KEY))
            model = {"path": str(self.model_dir), "tokenizer": str(self.model_dir / "tokenizer")}
            self.job = self.client.submit({**JOB, "model": model}).id
            self._await_model()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self._run(self._stack.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def interactions(self) -> dict[str, Interaction]:
        """Return every recorded interaction, by id."""

        async def read() -> list[Interaction]:
            state = read_state(self._stack.options.data_dir)
            assert state is not None
            async with await Bus.connect(state.nats_url, name="test") as bus:
                messages = await bus.read(subjects.INTERACTIONS, subjects.interactions(self.job))
            return [unpack(message.data, Interaction)[0] for message in messages]

        return {interaction.id: interaction for interaction in self._run(read())}

    def await_training(self, feedback: str) -> None:
        """Wait until an item of feedback is trained. A batch has two items and clients post odd numbers: add one."""
        self.client.feedback("accepted", True, inference=self._ask().json()["id"])

        def trained() -> bool:
            status = self.client.feedback_status(feedback)
            assert status.status not in ("rejected", "expired", "retracted", "quarantined"), status
            return status.status == "trained"

        self.until(trained, f"the training on {feedback}")

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Wait until ``true()`` returns a true value."""
        deadline = time.monotonic() + READY_S
        while not true():
            assert time.monotonic() < deadline, f"{what}: not within {READY_S:g} s; {self.client.why(self.job)}"
            time.sleep(0.1)

    def _await_model(self) -> None:
        self.until(lambda: self._ask(store=False).is_success, "the first answer")

    def _ask(self, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
        headers = {"authorization": f"Bearer {API_KEY}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=READY_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(READY_S + 10)


@pytest.fixture(scope="session")
def deployment(chain: ModuleType) -> Iterator[Deployment]:
    """Deployment for all clients, in memory if there is room, because an fsync costs nothing there."""
    root = SHM if SHM.is_dir() and shutil.disk_usage(SHM).free > 2 << 30 else None
    with (
        tempfile.TemporaryDirectory(prefix="penstock-clients-", dir=root) as directory,
        Deployment(Path(directory), chain.save_chain) as deployment,
    ):
        yield deployment


@pytest.fixture(scope="session")
def client_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a client's process: none of Penstock's, a home of its own, and no access to the hub."""
    kept = {name: os.environ[name] for name in ("PATH", "SSL_CERT_FILE") if name in os.environ}
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Ran:
    """Result of a client that succeeded."""

    output: dict[str, Any]
    """Last line of its output, decoded."""
    records: list[Interaction]
    """Interactions that the deployment recorded during the run."""
    deployment: Deployment


@pytest.fixture
def start_openai(
    python_of: Callable[[str], Path], client_environment: dict[str, str]
) -> Callable[[str, str], Awaitable[Process]]:
    """Function that starts a script of this folder with OpenAI's client, for the model `agent` at a URL."""
    python = python_of("openai")

    async def start(script: str, url: str) -> Process:
        return await asyncio.create_subprocess_exec(
            python, "-I", HERE / script, url, "none", MODEL, stdout=PIPE, stderr=STDOUT, env=client_environment
        )

    return start


@pytest.fixture
def run_client(
    python_of: Callable[[str], Path],
    client_environment: dict[str, str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Callable[[str], Ran]:
    """Function that runs ``scripts/NAME.py URL KEY MODEL TOKENIZER`` with the client's interpreter."""

    def run(name: str) -> Ran:
        python = python_of(name)
        deployment: Deployment = request.getfixturevalue("deployment")  # not started if the client is not installed
        before = deployment.interactions()
        words = [deployment.url, API_KEY, MODEL, str(deployment.model_dir / "tokenizer")]
        done = subprocess.run(
            [python, "-I", HERE / "scripts" / f"{name}.py", *words],
            env={**client_environment, "PATH": f"{python.parent}:{os.environ['PATH']}"},
            cwd=tmp_path, timeout=SCRIPT_S, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-20_000:]
        after = deployment.interactions()
        new = [after[id] for id in after.keys() - before.keys()]
        return Ran(json.loads(done.stdout.strip().splitlines()[-1]), new, deployment)

    return run
