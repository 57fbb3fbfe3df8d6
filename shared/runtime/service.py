"""Life cycle of a service process: settings, logs, health, bus, heartbeats, signals, drain, exit code.

Exit codes: 0 ended or drained after SIGTERM/SIGINT; 1 failed, or did not drain in time; 2 invalid configuration. A
second signal aborts the drain.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

from penstock.shared.config.jobs.needs import ANNOUNCED
from penstock.shared.config.service import ServiceSettings, load_settings
from penstock.shared.errors import ConfigError, DeadlineError, NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import MAX_SKEW_S, clock_skew_s
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.runtime import metrics
from penstock.shared.runtime.health import HealthServer
from penstock.shared.runtime.logs import setup_logging
from penstock.shared.runtime.tasks import Background, wait_for
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.connection import redact

__all__ = ["EXIT_CONFIG", "EXIT_FAILED", "EXIT_OK", "Service", "ServiceFactory", "run_service", "serve_process"]

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
CONNECT_S = 5.0
"""Length of one attempt to connect to the bus (seconds); each failed attempt is logged."""
RETRY_S = 0.5
CLOCK_EVERY_S = 10.0
COORDINATOR = "coordinator"
"""Name of the service that creates the streams."""

LOOP_LAG = metrics.gauge("event_loop_lag_seconds", "How late the event loop woke the heartbeat.")
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAG = metrics.histogram("loop_lag_seconds", "How late the event loop wakes a timer.", (), LAG_BUCKETS_S)
WORST_LAG = metrics.gauge("loop_lag_worst_seconds", "The latest wake-up of the last 10 to 20 s.")
PROBE_S = 0.05
"""Interval of the timers whose delay is measured (seconds)."""
WORST_OF_S = 10.0
BUS_UP = metrics.gauge("bus_connected", "1 while the bus is connected.")
CLOCK_SKEW = metrics.gauge("clock_skew_seconds", "How far the wall clock of this host is ahead of the bus's.")
BUS_RECONNECTS = metrics.gauge("bus_reconnects", "How often the bus connection was re-established.")


class Service(Protocol):
    """Interface of a service, which ``run_service`` runs."""

    ready: bool
    """True if the service accepts work."""

    async def run(self) -> None:
        """Serve until cancelled, or return when no work is left."""

    async def drain(self) -> None:
        """Finish current work, accept no new work, and return when done."""

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the status of each job, by job id, for the heartbeat."""


class ServiceFactory(Protocol):
    """Class (or function with a ``name``) that creates a service."""

    name: str

    def __call__(self, bus: Bus, settings: ServiceSettings) -> Service:
        """Create the service, without awaiting anything."""


def run_service(factory: ServiceFactory) -> None:
    """Run a service process to its end and exit the interpreter with its exit code."""
    faulthandler.enable()
    try:
        settings = load_settings()
        directory = settings.data_dir / "logs" if settings.log_files else None
        setup_logging(settings.log_level, service=factory.name, worker=settings.worker_id, directory=directory)
    except ConfigError as error:
        sys.stderr.write(f"{factory.name}: {error}\n")
        sys.exit(EXIT_CONFIG)
    gc.freeze()  # imported objects stay: without this a full collection blocks the loop of a worker for 0.25 s
    gc.enable()
    code = _run(serve_process(factory, settings))
    if code == EXIT_FAILED:
        _leave_threads(code)
    gc.freeze()  # freeze all objects, or the interpreter traverses those of torch at exit: a second of CPU
    sys.exit(code)


def _leave_threads(code: int) -> NoReturn:
    """Exit the process with ``code`` at once, without waiting for threads: a thread that waits for a lost rank, or
    computes a long step, might never end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    code: int = uvloop.run(main)
    return code


async def serve_process(factory: ServiceFactory, settings: ServiceSettings) -> int:
    """Run a service with ``settings`` and return the exit code."""
    try:
        process = _Process(factory, settings)
        return await process.serve()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    except Exception:  # the end of the process: log any error and return the exit code
        log.exception("%s failed", factory.name)
        return EXIT_FAILED


class _Process:
    def __init__(self, factory: ServiceFactory, settings: ServiceSettings) -> None:
        self._factory = factory
        self._settings = settings
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._waiting_for = f"the bus at {redact(settings.nats_url)}"
        self._bus: Bus | None = None
        self._service: Service | None = None
        self._health_port = 0
        self._is_wrong = False
        self._started = time.time()
        self._packages = [name for name in ANNOUNCED if importlib.util.find_spec(name) is not None]
        self._packages += settings.engines

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        settings = self._settings
        try:
            async with HealthServer(settings.health_host, settings.health_port, self._ready) as health:
                log.info("health on http://%s:%d", health.host, health.port)
                bus = await self._unless_stopped(self._connect())
                if bus is None:
                    return EXIT_OK
                async with bus:
                    return await self._work(bus, health.port)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _work(self, bus: Bus, health_port: int) -> int:
        self._waiting_for = "the streams"
        if await self._unless_stopped(self._ensure_streams(bus)) is None:
            return EXIT_OK
        self._waiting_for = "the clock of the bus"
        if await self._unless_stopped(self._measure_clock(bus)) is None:
            return EXIT_OK
        self._bus, self._service = bus, self._factory(bus, self._settings)
        self._waiting_for = ""
        async with Background() as background:
            self._health_port = health_port
            background.spawn(self._beat(), name="heartbeat")
            background.spawn(self._follow_clock(bus), name="clock")
            background.spawn(_measure_lag(), name="loop lag")
            running = asyncio.create_task(self._service.run(), name=self._factory.name)
            try:
                await self._first(running, self._stop)
                if running.done():
                    await running
                    return EXIT_OK
                return await self._drain(self._service, running)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _drain(self, service: Service, running: asyncio.Task[None]) -> int:
        log.info("draining for at most %g s", self._settings.drain_s)
        draining = asyncio.create_task(service.drain(), name="drain")
        try:
            await wait_for(self._first(draining, self._hurry), self._settings.drain_s, "drain")
        except DeadlineError as error:
            log.warning("%s; ending anyway", error)
        if not draining.done():
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            return EXIT_FAILED
        await draining
        await self._sign()
        log.info("drained")
        return EXIT_OK

    async def _connect(self) -> Bus:
        settings = self._settings
        while True:
            try:
                name = f"{self._factory.name} {settings.worker_id}"
                return await Bus.connect(settings.nats_url, name=name, deadline_s=CONNECT_S, tls=settings.nats_tls)
            except Unavailable as error:
                log.warning("waiting for the bus: %s", error)

    async def _ensure_streams(self, bus: Bus) -> bool:
        """Create the streams (coordinator) or wait until a coordinator has created them (other services); then return
        True.

        Sizes of existing streams do not change here. Only the coordinator's own service changes them, because the
        settings of two services could conflict.
        """
        settings = self._settings
        reported = ""
        while True:
            try:
                if self._factory.name == COORDINATOR:
                    await bus.ensure_streams(
                        experience_bytes=settings.experience_bytes, stream_bytes=settings.stream_bytes,
                        ledger_bytes=settings.ledger_size, replicas=settings.stream_replicas, update=False,
                    )  # fmt: skip
                    return True
                absent = await bus.missing_streams()
                if not absent:
                    return True
                why = f"a coordinator has not created {', '.join(absent[:3])} yet"
            except Unavailable as error:
                why = str(error)
            if why != reported:
                log.warning("waiting for the streams: %s", why)
            reported = why
            await asyncio.sleep(RETRY_S)

    async def _measure_clock(self, bus: Bus) -> bool:
        """Measure the offset between this host's clock and bus time, with retries until a measurement succeeds; then
        return True.

        A warning is logged when the clock becomes wrong.
        """
        while True:
            try:
                skew_s = await bus.measure_clock()
            except (Unavailable, NotFound) as error:
                log.warning("waiting for the time of the bus: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            was_wrong, self._is_wrong = self._is_wrong, abs(skew_s or 0.0) > MAX_SKEW_S
            if self._is_wrong and not was_wrong:
                how = f"{abs(skew_s or 0.0):.1f} s {'ahead of' if (skew_s or 0.0) > 0 else 'behind'}"
                log.warning("the clock of this host is %s the clock of NATS: bus time decides; set one of them", how)
            CLOCK_SKEW.set(skew_s or 0.0)
            return True

    async def _follow_clock(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(CLOCK_EVERY_S)
            await self._measure_clock(bus)

    async def _beat(self) -> None:
        interval_s, loop = self._settings.heartbeat_s, asyncio.get_running_loop()
        while True:
            await self._sign()
            due = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            LOOP_LAG.set(max(loop.time() - due, 0.0))

    async def _sign(self) -> None:
        """Send one heartbeat. After a drain the last heartbeat has ``ready`` False, so that the coordinator does not
        report the process as lost."""
        settings, bus, service = self._settings, self._bus, self._service
        assert bus is not None
        assert service is not None
        beat = Heartbeat(
            service=self._factory.name,
            worker=settings.worker_id,
            host=settings.host_id,
            pid=os.getpid(),
            started=self._started,
            interval_s=settings.heartbeat_s,
            health_port=self._health_port,
            ready=self._ready()[0],
            jobs=service.status(),
            packages=self._packages,
            clock_skew_s=clock_skew_s(),
        )
        BUS_UP.set(bus.connected)
        BUS_RECONNECTS.set(bus.reconnects)
        try:
            await bus.notify(subjects.heartbeat(self._factory.name, settings.worker_id), pack(beat))
        except Unavailable as error:
            log.debug("no heartbeat: %s", error)

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        service, bus = self._service, self._bus
        waiting_for = self._waiting_for
        if bus is not None and not bus.connected:
            waiting_for = "the bus to come back"
        elif self._stop.is_set():
            waiting_for = "the end: draining"
        elif service is not None and not service.ready:
            waiting_for = "the service to become ready"
        details = {"service": self._factory.name, "worker": self._settings.worker_id, "waiting_for": waiting_for}
        return not waiting_for, details

    def _on_signal(self, number: int) -> None:
        log.info("got %s", signal.Signals(number).name)
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        task = asyncio.create_task(work)
        await self._first(task, self._stop)
        if task.done():
            return await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    @staticmethod
    async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
        """Wait until the task is done or the event is set."""
        waiter = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()


async def _measure_lag() -> None:
    """Measure how late the timers of the event loop fire, until cancelled."""
    loop = asyncio.get_running_loop()
    before, worst, began = 0.0, 0.0, loop.time()
    while True:
        due = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lag_s = max(loop.time() - due, 0.0)
        LAG.observe(lag_s)
        if loop.time() - began > WORST_OF_S:
            before, worst, began = worst, 0.0, loop.time()
        worst = max(worst, lag_s)
        WORST_LAG.set(max(before, worst))
