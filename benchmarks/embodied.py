"""Embodied jobs beside the loops that they take the place of.

    python benchmarks/embodied.py steps [--out results.json] [--seconds 10] [--envs 1 8 64] [--tasks reach ...]

``steps``: environment steps per second of one rollout worker and one env service, each in a process of its own, with
real tickets, against a bare loop: one process that holds as many environments, the same policy and nothing else. And
the round trip of 64 observations of 39 numbers through an environment that costs nothing, above the policy's own time,
and that of 64 pictures of 224 x 224 x 3 bytes, without any policy. Target of both: 1.5 ms at the median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import uvloop
from report import Report

from penstock.services.env.simulators import describe_simulator
from penstock.services.env.simulators.child import load_backend
from penstock.services.rollout.embodied.engine import PolicyEngine
from penstock.services.rollout.embodied.films import FilmMaker
from penstock.services.rollout.embodied.session import EmbodiedSession
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.episode_policy import EpisodePolicy, build_policy
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.embodied.environment import OpenEnv, ResetRequest, StepRequest
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
from penstock.shared.transport.server import NatsServer
from penstock.shared.weights import layout_of, open_publisher

JOB = "job_bench"
HERE = Path(__file__).parent
BACKENDS = HERE.parent / "services" / "env" / "simulators" / "backends"
ROUND_TRIP_S = 1.5e-3
ROUND_TRIP_ENVS = 64
TICKETS_AHEAD = 512
WARM_S = 3.0


@dataclass(frozen=True)
class Task:
    """A simulator to measure."""

    backend: str
    env_id: str
    horizon: int
    bytes_per_step: int


TASKS = {
    "reach": Task("metaworld", "reach-v3", 500, 1024),
    "halfcheetah": Task("gymnasium", "HalfCheetah-v5", 1000, 1024),
    "still": Task("gymnasium", "still:Still-v0", 500, 1024),
}


def job_of(task: Task, *, num_envs: int, sessions: int) -> EmbodiedJob:
    """A job whose groups are single episodes."""
    return EmbodiedJob.parse(
        {
            "kind": "embodied", "name": "bench",
            "environment": {
                "backend": task.backend, "task": task.env_id, "horizon": task.horizon, "num_envs": num_envs,
                "sessions": sessions, "bytes_per_step": task.bytes_per_step,
                "num_reset_ids": 1000,
            },
            "policy": {"hidden_sizes": [64, 64]},
            "train": {"batch_size": 1, "max_updates": 1},
            "limits": {"byte_budget": 1 << 30},
        }
    )  # fmt: skip


def policy_of(config: EmbodiedJob) -> EpisodePolicy:
    """The first policy of a job."""
    sim = config.environment
    request = OpenEnv(env_id=sim.task, num_envs=1, backend=sim.backend, options=sim.options)
    spec = describe_simulator(request, Path("/nonexistent"))
    return build_policy(config.policy, spec, action_chunk=1, seed=config.seed)


# -- the bare loop ----------------------------------------------------------------------------------------------------


def bare(task: Task, num_envs: int, seconds: float) -> float:
    """Steps per second of a plain loop in this process: policy, then every environment in turn."""
    policy = policy_of(job_of(task, num_envs=1, sessions=1))
    make = load_backend(str(BACKENDS / f"{task.backend}_backend.py"))
    environments = [make(task.env_id, {}) for _ in range(num_envs)]
    resets = iter(range(1 << 30))
    seen = [environment.reset(next(resets) % 1000)["state"] for environment in environments]
    generator, steps, lengths = np.random.default_rng(0), 0, [0] * num_envs
    began = time.perf_counter()
    warm_until, ends = began + WARM_S / 3, began + WARM_S / 3 + seconds
    while (now := time.perf_counter()) < ends:
        if now < warm_until:
            steps, began = 0, now
        noise = torch.from_numpy(generator.standard_normal((num_envs, 1, policy.noise_shape[1]), np.float32))
        decision = policy.act({"state": torch.from_numpy(np.stack(seen))}, noise)
        actions = policy.to_environment(decision.actions_NCA)
        for i, environment in enumerate(environments):
            observations, _, terminated, truncated, _ = environment.step(actions[i, 0])
            lengths[i] += 1
            if terminated or truncated or lengths[i] >= task.horizon:
                observations, lengths[i] = environment.reset(next(resets) % 1000), 0
            seen[i] = observations["state"]
        steps += num_envs
    return steps / (time.perf_counter() - began)


# -- one rollout worker -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def deployment(directory: Path) -> AsyncIterator[tuple[Bus, ServiceSettings]]:
    """A broker, an env service, and a connection for the worker, which runs in this process."""
    settings = ServiceSettings(worker_id="rollout-0", shm_dir=directory, data_dir=directory)
    with NatsServer(directory / "nats") as server:
        env = {**os.environ, "PENSTOCK_NATS_URL": server.url, "PENSTOCK_SHM_DIR": str(directory)}
        service = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock.services.env", env=env)
        try:
            async with await Bus.connect(server.url, name="rollout") as bus:
                await bus.ensure_streams(experience_bytes=4 << 30, stream_bytes=256 << 20)
                yield bus, settings
        finally:
            service.terminate()
            await service.wait()


@asynccontextmanager
async def working(bus: Bus, settings: ServiceSettings, config: EmbodiedJob) -> AsyncIterator[EmbodiedSession]:
    """A worker with version 1 and more tickets than it can take."""
    policy = await asyncio.to_thread(policy_of, config)
    tensors = [(name, tensor.detach().clone()) for name, tensor in policy.state_dict().items()]
    publisher = open_publisher(JOB, layout_of(tensors), settings)
    manifest = publisher.publish(tensors, version=1, epoch=1)
    await bus.kv(subjects.MANIFESTS).put(JOB, pack(manifest, job=JOB, id="m", epoch=1))
    for ordinal in range(TICKETS_AHEAD):
        ticket = Ticket(draw=Draw(ordinal), min_version=0, deadline=time.time() + 3600, deadline_s=3600, epoch=1)
        await bus.publish(subjects.tickets(JOB), pack(ticket, job=JOB))
    session = EmbodiedSession(bus, settings, JOB, config, FilmMaker(bus, settings))
    task = asyncio.create_task(session.run())
    try:
        yield session
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close()


def cpu_seconds() -> dict[str, float]:
    """CPU time of each process of the deployment until now; the broker's, the env service's and its children's."""
    names = {"nats-server": "broker", "penstock.services.env": "env service", "simulators/child.py": "simulators"}
    me = psutil.Process()
    used = {"rollout worker": sum(me.cpu_times()[:2])}
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            name = next((name for part, name in names.items() if part in line), "others")
            used[name] = used.get(name, 0.0) + sum(process.cpu_times()[:2])
    return used


async def worker(config: EmbodiedJob, seconds: float) -> dict[str, float]:
    """Steps per second of a worker, and microseconds of CPU time per step of each process."""
    with tempfile.TemporaryDirectory() as name:
        async with deployment(Path(name)) as (bus, settings), working(bus, settings, config) as session:
            async with asyncio.timeout(300):
                while not session.status()["steps"]:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(WARM_S)
            began, before, used = time.perf_counter(), session.status()["steps"], cpu_seconds()
            await asyncio.sleep(seconds)
            passed, steps = time.perf_counter() - began, session.status()["steps"] - before
            cpu = {name: 1e6 * (spent - used.get(name, 0.0)) / steps for name, spent in cpu_seconds().items()}
            return {"steps_per_s": steps / passed, **cpu}


async def round_trip(seconds: float) -> dict[str, float]:
    """A round of one session, its policy and its request, in seconds at the median; ``above`` is without the policy."""
    rounds: list[float] = []
    policy: list[float] = []
    steps: list[float] = []
    inside, step = PolicyEngine._decide, EnvClient.step
    last = 0.0

    def timed_inside(self: PolicyEngine, *args: Any) -> Any:
        nonlocal last
        start = time.perf_counter()
        found = inside(self, *args)
        if last:
            rounds.append(start - last)
        last = start
        policy.append(time.perf_counter() - start)
        return found

    async def timed_step(self: EnvClient, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = await step(self, *args, **kwargs)
        steps.append(time.perf_counter() - start)
        return found

    PolicyEngine._decide, EnvClient.step = timed_inside, timed_step  # type: ignore[method-assign,assignment]
    try:
        await worker(job_of(TASKS["still"], num_envs=ROUND_TRIP_ENVS, sessions=1), seconds)
    finally:
        PolicyEngine._decide, EnvClient.step = inside, step  # type: ignore[method-assign]
    above = np.asarray(rounds) - np.asarray(policy[: len(rounds)])
    return {
        "round_s": float(np.median(rounds)), "policy_s": float(np.median(policy)), "request_s": float(np.median(steps)),
        "above_s": float(np.median(above)), "above_fastest_s": float(np.quantile(above, 0.1)), "rounds": len(rounds),
    }  # fmt: skip


async def picture_trip(seconds: float) -> dict[str, float]:
    """One request to step 64 environments that observe a picture each, and its reply, in seconds."""
    ids, rounds = np.arange(ROUND_TRIP_ENVS, dtype=np.int32), list[float]()
    with tempfile.TemporaryDirectory() as name:
        async with deployment(Path(name)) as (bus, settings):
            with FrameMail(settings) as mail:
                request = OpenEnv(env_id="still:StillPictures-v0", num_envs=ROUND_TRIP_ENVS)
                client = await EnvClient.open(bus, mail, request, job=JOB)
                await client.reset(ResetRequest(seq=0, env_ids=ids, state_ids=ids.astype(np.int64)))
                actions = np.zeros((ROUND_TRIP_ENVS, 1, 4), np.float32)
                until = time.perf_counter() + seconds
                while (start := time.perf_counter()) < until:
                    await client.step(
                        StepRequest(
                            seq=client.seq, auto_reset=False, env_ids=ids, actions=actions,
                            next_state_ids=np.zeros(0, np.int64),
                        )
                    )  # fmt: skip
                    rounds.append(time.perf_counter() - start)
                await client.close()
    return {"request_s": float(np.median(rounds)), "p99_s": float(np.quantile(rounds, 0.99)), "rounds": len(rounds)}


def layouts(task: Task, num_envs: int) -> list[EmbodiedJob]:
    """All environments in one session, and half of them in each of two."""
    one = [job_of(task, num_envs=num_envs, sessions=1)]
    return one if num_envs == 1 else [*one, job_of(task, num_envs=num_envs // 2, sessions=2)]


def steps_report(arguments: argparse.Namespace) -> int:
    """The subcommand ``steps``."""
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = str(HERE)  # for processes of simulators: `still.py`
    report = Report(
        "Environment steps per second: one rollout worker and a bare loop",
        ["task, environments", "bare loop", "one session", "two sessions", "of the bare loop"],
    )
    for name in arguments.tasks:
        for num_envs in arguments.envs:
            alone = bare(TASKS[name], num_envs, arguments.seconds)
            found = [uvloop.run(worker(config, arguments.seconds)) for config in layouts(TASKS[name], num_envs)]
            rates = [one["steps_per_s"] for one in found]
            report.row(
                f"{name}, {num_envs}", f"{alone:.0f}", *(f"{rate:.0f}" for rate in rates), *([""] * (2 - len(rates))),
                f"{100 * max(rates) / alone:.0f} %",
            )  # fmt: skip
            report.results[f"{name}_{num_envs}"] = {"bare": alone, "worker": found}
    found_trip = uvloop.run(round_trip(arguments.seconds))
    ms = {key: f"{1e3 * value:.2f} ms" for key, value in found_trip.items()}
    report.row(
        f"round trip, {ROUND_TRIP_ENVS} x 39", f"round {ms['round_s']}", f"policy {ms['policy_s']}",
        f"request {ms['request_s']}", f"{ms['above_s']} above",
    )  # fmt: skip
    report.results["round_trip"] = found_trip
    report.check(
        f"a round trip within {1e3 * ROUND_TRIP_S:g} ms above the policy", found_trip["above_s"] <= ROUND_TRIP_S
    )
    pictures = uvloop.run(picture_trip(arguments.seconds))
    shown = f"{1e3 * pictures['request_s']:.2f} ms"
    report.row(f"round trip, {ROUND_TRIP_ENVS} pictures", "", "", f"request {shown}", f"{shown} above")
    report.results["picture_trip"] = pictures
    report.check(f"{ROUND_TRIP_ENVS} pictures within {1e3 * ROUND_TRIP_S:g} ms", pictures["request_s"] <= ROUND_TRIP_S)
    return report.finish(arguments.out)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("--out", type=Path)
    steps.add_argument("--seconds", type=float, default=10.0)
    steps.add_argument("--envs", type=int, nargs="*", default=[1, 8, 64])
    steps.add_argument("--tasks", nargs="*", choices=list(TASKS), default=["reach", "halfcheetah"])
    steps.set_defaults(run=steps_report)
    arguments = parser.parse_args()
    found: int = arguments.run(arguments)
    return found


if __name__ == "__main__":
    sys.exit(main())
