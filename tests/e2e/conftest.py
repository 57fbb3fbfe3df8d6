"""Fixtures for tests of a whole deployment: real processes, which the tests observe over HTTP, streams and signals.

The service processes come from the nursery (``tests/nursery.py``). ``test_local_stack.py`` and the tests of the
containers start services as users do.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import httpx
import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app
from penstock.client import Client
from penstock.local import Stack, StackOptions, read_state
from penstock.local.launch import Launch, Process
from penstock.local.ports import free_ports
from penstock.shared.config.base import with_overrides
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.episode_group import decode_any_group
from penstock.shared.protocol.events import BatchTrained, Checkpointed, Event, Finished, LineageForked, decode_events
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord
from penstock.shared.runtime.ledger import ledger_archive, read_ledger
from penstock.shared.transport.bus import Bus, Message

T = TypeVar("T")

API_KEY = "e2e-key"
LEASE_S = 1.5
RANK_SILENCE_S = 5.0
SHM = Path("/dev/shm")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
WAIT_MS = 60_000
DESKTOP = {"width": 1440, "height": 1000}
USER_CODE = Path(__file__).with_name("user_code")
TASKSETS = Path(__file__).parents[1] / "clients" / "environments"
POLL_S = 0.1
EXPERIENCE_BYTES, LEDGER_BYTES = 80 << 20, 32 << 20
"""Sizes of the streams EXPERIENCE and LEDGER, small enough that a test can fill them."""

JOB: dict[str, Any] = {
    "name": "e2e",
    "model": {
        "config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "max_position_embeddings": 32,
        },
        "tokenizer": "char",
        "characters": "0123456789+=",
    },
    "data": {"train": {"type": "addition", "digits": 1}, "prompt": {"max_tokens": 8}},
    # About half of what random weights write begins like this, so that every batch has something to learn.
    "reward": {"scorers": [{"type": "format", "pattern": "[0-4+].*"}], "processes": 1},
    "algorithm": {"group_size": 4},
    "sampling": {"max_new_tokens": 6},
    "optimizer": {"learning_rate": 1e-4},
    "train": {"batch_size": 16, "max_updates": 8, "max_lag": 1, "draw_timeout_s": 15},
    "checkpoint": {"every": 7, "keep": 2},
    "limits": {"byte_budget": 4 << 20},
}


class Deployment:
    """A running stack. Its event loop runs in a thread of its own, so that tests are plain functions."""

    def __init__(
        self,
        directory: Path,
        launch: Launch,
        *,
        trainer_ranks: int = 1,
        workers: Mapping[str, int] | None = None,
        pythons: Mapping[str, Path] | None = None,
    ) -> None:
        self.directory, self.launch = directory, launch
        (directory / "shm").mkdir(parents=True)
        self.shm = directory / "shm"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.messages: list[str] = []
        self.ready_s = 60.0
        self.environment = {
            "PENSTOCK_LEASE_S": str(LEASE_S),
            "PENSTOCK_HEARTBEAT_S": "0.3",
            "PENSTOCK_API_KEYS": API_KEY,
            "PENSTOCK_RATE_LIMIT": "100000/minute",
            "PENSTOCK_EXPERIENCE_BYTES": str(EXPERIENCE_BYTES),
            "PENSTOCK_LEDGER_BYTES": str(LEDGER_BYTES),
            "PENSTOCK_SHM_DIR": str(self.shm),
            "PENSTOCK_RANK_SILENCE_S": str(RANK_SILENCE_S),
            "PENSTOCK_BASE_MODELS": str(USER_CODE / "base_models"),
            "PENSTOCK_WEBHOOK_PRIVATE": "true",
            "PYTHONPATH": f"{USER_CODE}{os.pathsep}{TASKSETS}",
        }
        self.data_dir = directory / "data"
        options = StackOptions(
            data_dir=self.data_dir, environment=self.environment, trainer_ranks=trainer_ranks, drain_s=5,
            workers=dict(workers or {"rollout": 1}), launch=launch, pythons=dict(pythons or {}),
        )  # fmt: skip
        self.stack = Stack(options, self.messages.append)

    def __enter__(self) -> Deployment:
        self.run(self.stack.__aenter__())
        try:
            self.run(self.stack.ready(deadline_s=self.ready_s), self.ready_s + 30)
        except BaseException:
            self.close()
            raise
        self.client = Client(self.stack.url, api_key=API_KEY, retries=10)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.close()

    def close(self) -> None:
        """Stop every process of the stack and the thread of its event loop."""
        self.run(self.stack.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 90.0) -> T:
        """Run a coroutine on the event loop of the stack; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    # -- processes ---------------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Return the current process id of a service or server."""
        return self.stack.processes[name]

    def kill(self, *names: str) -> None:
        """Send SIGKILL to all named processes at once; return after the supervisor has restarted each of them."""
        before = {name: self.pid(name) for name in names}
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        self.until(
            lambda: all(self.pid(name) not in (0, pid) for name, pid in before.items()),
            f"restart of {', '.join(names)}",
        )

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop a process by SIGSTOP during the block. Afterwards it continues, unless something has killed it."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def attached(self, module: str, worker: str) -> Iterator[Process]:
        """Start one more worker by hand and yield its process once it is ready; kill it at the end of the block."""
        port = free_ports(1)[0]
        env = {**os.environ, **self.environment_of(worker), "PENSTOCK_HEALTH_PORT": str(port)}
        with (self.directory / "data" / "logs" / f"{worker}.log").open("wb") as log:
            process = self.launch(module, env, log)
        try:
            self.until(lambda: is_ready(port), f"{worker} is ready", 60, lambda: self.log(worker)[-2000:])
            yield process
        finally:
            process.kill()
            process.wait()

    def environment_of(self, worker: str) -> dict[str, str]:
        """Return the environment variables with which one more worker joins this stack."""
        state = read_state(self.directory / "data")
        assert state is not None
        return {
            **self.environment,
            "PENSTOCK_NATS_URL": state.nats_urls[worker.partition("-")[0]],
            "PENSTOCK_DATA_DIR": state.data_dir,
            "PENSTOCK_WORKER_ID": worker,
        }

    def log(self, worker: str) -> str:
        """Return what a worker has logged so far."""
        return (self.directory / "data" / "logs" / f"{worker}.log").read_text()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, *changes: str, **sections: Any) -> str:
        """Submit the small job with ``a.b=value`` changes and whole sections replaced; return its id."""
        return self.client.submit(job_file(*changes, **sections)).id

    def status(self, job: str) -> Any:
        """Return the observed status of a job."""
        return self.client.get(job).status

    def reach(self, job: str, step: int, seconds: float = 90.0) -> int:
        """Wait until a job has made ``step`` updates; return how many it has made by then."""

        def there() -> bool:
            status = self.status(job)
            assert status.phase not in TERMINAL_PHASES or status.step >= step, (status.phase, status.message)
            return bool(status.step >= step)

        self.until(there, f"update {step} of {job}", seconds, lambda: self.client.why(job))
        return int(self.status(job).step)

    def finish(self, job: str, seconds: float = 60.0) -> JobRecord:
        """Wait until a job has ended; return its record. After ``seconds``, cancel it to free its room, and fail."""
        try:
            self.until(
                lambda: self.status(job).phase in TERMINAL_PHASES,
                f"the end of {job}", seconds, lambda: (self.status(job), self.client.why(job)),
            )  # fmt: skip
        except pytest.fail.Exception:
            with suppress(PenstockError):
                self.client.cancel(job, checkpoint=False)
            raise
        return self.client.get(job)

    def until(
        self, true: Callable[[], Any], what: str, seconds: float = 60.0, details: Callable[[], object] = lambda: ""
    ) -> Any:
        """Wait for a true value of ``true()``, and return it. A timeout fails with ``what`` and ``details()``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if found := true():
                    return found
            except Unavailable:
                pass
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {seconds:g} s; {details()}; restarts: {self.messages}")
            time.sleep(POLL_S)

    def check_audit(self, job: str) -> dict[str, Any]:
        """Check that the draws in the status add up and that the audit finds no violation; return the audit."""
        status = self.status(job)
        draws = status.draws
        assert status.phase not in TERMINAL_PHASES or isinstance(self.ledger(job)[-1], Finished), "the last event"
        assert draws["drawn"] == draws["trained"] + sum(draws["dropped"].values()) + draws["in_flight"]
        audit = self.client.audit(job)
        assert audit["ok"], audit["violations"]
        equation = {name: audit["equation"][name] for name in draws}
        assert equation == draws
        return audit

    def updates_to_repeat(self, job: str) -> int:
        """Return how many updates a new trainer would have to repeat if the trainer died now."""
        newest = {
            type(event): event.number for event in self.ledger(job) if isinstance(event, BatchTrained | Checkpointed)
        }
        return newest[BatchTrained] - newest[Checkpointed]

    def check_updates(self, job: str, total: int, *, trainers: int) -> None:
        """Check that a job ended by itself and counts each update once, also those that a restarted trainer repeated.

        ``trainers`` is the least number of trainer processes that trained the job; at least two coordinators led it.
        """
        record = self.finish(job, 200)
        assert (record.status.phase, record.status.step) == ("succeeded", total), record.status
        self.check_audit(job)
        events = self.ledger(job)
        trained = [event for event in events if isinstance(event, BatchTrained)]
        assert [event.number for event in trained] == list(range(1, total + 1))
        assert not any(isinstance(event, LineageForked) for event in events), "a restarted trainer gave other digests"
        assert len({event.trainer_epoch for event in trained}) >= trainers
        assert len({event.writer_epoch for event in events}) >= 2, "the coordinator came back with a higher epoch"

    def check_replay(self, job: str, at_least: int) -> None:
        """Check that a replay of the log gives the digests in the ledger, for at least ``at_least`` updates."""
        rows = list(self.client.replay(job))
        assert rows[-1]["ok"], rows[-1]
        assert sum(row["match"] is True for row in rows) >= at_least, rows

    # -- streams -----------------------------------------------------------------------------------------------------

    def on_bus(self, ask: Callable[[Bus], Awaitable[T]]) -> T:
        """Connect to the bus of this stack; return the result of ``ask``."""

        async def go() -> T:
            state = read_state(self.directory / "data")
            assert state is not None
            async with await Bus.connect(state.nats_url, name="test") as bus:
                return await ask(bus)

        return self.run(go())

    def ledger(self, job: str) -> list[Event]:
        """Return every event in the ledger of a job."""
        entries = self.on_bus(lambda bus: read_ledger(bus, job, ledger_archive(self.directory / "data")))
        return [event for entry in entries for event in decode_events(entry.data)]

    def groups(self, job: str) -> dict[int, Any]:
        """Return every group of a job in the stream, of completions or of episodes, by sequence number."""

        async def read(bus: Bus) -> dict[int, Message]:
            heads = await bus.read(subjects.EXPERIENCE, subjects.experience(job), headers_only=True)
            return await bus.get_whole(subjects.EXPERIENCE, [head.seq for head in heads])

        return {seq: decode_any_group(message.data) for seq, message in self.on_bus(read).items()}

    # -- command line ------------------------------------------------------------------------------------------------

    def cli(self, *words: str, **environment: str) -> Result:
        """Run ``penstock`` against this stack, in this process; return its result."""
        env = {"PENSTOCK_URL": self.stack.url, "PENSTOCK_API_KEY": API_KEY, **environment}
        return CliRunner().invoke(app, list(words), env=env)


def is_ready(port: int) -> bool:
    """Return True if the worker with this health port reports that it is ready."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", verify=False).is_success
    except httpx.TransportError:
        return False


def job_file(*changes: str, **sections: Any) -> dict[str, Any]:
    """Return the small job file with ``a.b=value`` changes and whole sections replaced."""
    return with_overrides({**copy.deepcopy(JOB), **sections}, changes)


def store() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary directory for a stack, in memory if there is room, because an fsync costs nothing there."""
    root = SHM if SHM.is_dir() and shutil.disk_usage(SHM).free > 2 << 30 else None
    return tempfile.TemporaryDirectory(prefix="penstock-e2e-", dir=root)


@pytest.fixture(scope="module")
def stack_folder() -> Iterator[Path]:
    """Folder for the stacks that the tests of one module start themselves."""
    with store() as path:
        yield Path(path)


@pytest.fixture(scope="session")
def stack(nursery: Any, close_stack: Callable[[Callable[[], None]], None]) -> Iterator[Deployment]:
    """One stack for all tests. Its supervisor restarts the processes that tests kill."""
    with ExitStack() as running:
        path = running.enter_context(store())
        deployment = running.enter_context(Deployment(Path(path), nursery.launch))
        close_stack(running.close)
        yield deployment


@pytest.fixture
def stack_of_ranks(nursery: Any) -> Iterator[Deployment]:
    """Stack whose trainer has two ranks."""
    with store() as path, Deployment(Path(path), nursery.launch, trainer_ranks=2) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def deploy(nursery: Any) -> Callable[..., Deployment]:
    """Function that creates a stack in a folder, for the test to start. Services come from the nursery or `launch`."""
    return lambda directory, launch=nursery.launch, **options: Deployment(directory, launch, **options)


@pytest.fixture(scope="module")
def stack_without_trainer(nursery: Any) -> Iterator[Deployment]:
    """Stack without trainers and simulators; tests start the trainers."""
    workers = {"rollout": 1, "trainer": 0, "env": 0}
    with store() as path, Deployment(Path(path), nursery.launch, workers=workers) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def make_job() -> Callable[..., dict[str, Any]]:
    """Function that returns the small job file with changes."""
    return job_file


@pytest.fixture(scope="session")
def user_code() -> ModuleType:
    """Module with the scorers of ``user_code/``, which the reward service imports, too."""
    spec = importlib.util.spec_from_file_location("e2e_scorers", USER_CODE / "e2e_scorers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Browser of this machine, for all tests of a file. Without a browser the tests are skipped."""
    from playwright.sync_api import expect, sync_playwright

    program = os.environ.get("PENSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        message = f"none of {', '.join(BROWSERS)} is installed; PENSTOCK_CHROMIUM may name one"
        (pytest.fail if os.environ.get("PENSTOCK_REQUIRE_BROWSER") else pytest.skip)(message)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=program, args=QUIET)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Tab with a browser session of its own. Script errors and violations of the CSP fail the test."""
    context = browser.new_context(viewport=DESKTOP)
    errors: list[str] = []
    context.on("weberror", lambda error: errors.append(str(error.error)))
    context.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
    tab = context.new_page()
    tab.set_default_timeout(WAIT_MS)
    yield tab
    context.close()
    assert errors == []


@pytest.fixture(scope="session")
def enter() -> Callable[..., None]:
    """Function that opens the web page and enters an API key."""

    def opened(page: Any, stack: Deployment, key: str = API_KEY, where: str = "") -> None:
        """Enter the key when the page asks, and wait until a request carries it: then a test may open another page."""
        page.goto(f"{stack.stack.url}/{where}")
        page.wait_for_selector("#ask-key[open]")
        page.fill("#key-text", key)
        with page.expect_request(lambda request: request.headers.get("authorization") == f"Bearer {key}"):
            page.keyboard.press("Enter")

    return opened
