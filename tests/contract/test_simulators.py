"""Contract of every simulator. Add the cases of a new simulator to ``CASES``.

Simulators of ``ELSEWHERE`` need what `penstock sims install NAME` installs in PENSTOCK_SIMS_DIR. Their tests are
skipped without it, or fail for the names in PENSTOCK_REQUIRE_SIMULATORS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from penstock.local.recording import record
from penstock.local.world_model import Fitting, fit, write_world_model
from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import (
    BACKENDS,
    INSTALLED,
    Chunk,
    Named,
    Simulator,
    adapter_of,
    describe_simulator,
    interpreter_of,
    open_simulator,
)
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.environment import (
    ArraySpec,
    OpenEnv,
    Picture,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
    decode_env,
    encode_env,
)
from penstock.shared.transport.bus import Bus
from tests.contract.simulated_envs import DIE, FOLDER, HANG, NOT_A_NUMBER, PROMPTING, RAISE, STEP, UNSTARTABLE
from tests.integration.test_env_service import JOB, open_session, run_env
from tests.processes import is_alive

NOWHERE = Path("/nonexistent")
LONG_S = 600
"""Time limit in seconds for imports of large libraries on a busy machine."""
HANG_S = 1.0
"""Time limit in seconds of a step for which the process is stopped."""
SLOW_TO_START = pytest.mark.timeout(LONG_S)
ELSEWHERE = ("maniskill", "libero")
OWN_SIMS = Path(__file__).with_name("sims")
"""Simulators directory with an adapter of a user, ``two_cameras``."""
REACH = OpenEnv(env_id="reach-v3", num_envs=3, backend="metaworld", options={"horizon": 20})
PUSH = OpenEnv(env_id="PushCube-v1", num_envs=3, backend="maniskill", options={"horizon": 20})
SOUP = OpenEnv(env_id="libero_object/0", num_envs=3, backend="libero", options={"horizon": 12, "assets": "primitive"})
Point = NDArray[np.float64]
UP = np.array([0.0, 0.0, 1.0])
CARRY: list[Callable[[Point, Point, Point], tuple[Point, float, Callable[[Point, Point], bool]]]] = [
    lambda _, cheese, __: (cheese + UP * 0.1, -1.0, lambda hand, aim: np.linalg.norm(hand - aim) < 0.01),
    lambda _, cheese, __: (cheese + UP * 0.005, -1.0, lambda hand, aim: np.linalg.norm(hand - aim) < 0.012),
    *[lambda hand, *_: (hand, 1.0, lambda *_: True)] * 4,
    lambda hand, *_: (np.array([*hand[:2], 0.3]), 1.0, lambda hand, aim: hand[2] > 0.27),
    lambda _, __, basket: (basket + UP * 0.3, 1.0, lambda hand, aim: np.linalg.norm((hand - aim)[:2]) < 0.02),
]
"""Stages of a controller for LIBERO: over the object, down, close, up, over the basket. Each takes the places of hand,
object and basket, and returns the hand's aim, -1 (open) or 1 (closed), and a test that the hand is there.
"""
SMALL = Picture(height=20, width=30, grey=True, frames=2)
NO_OPENGL = not (find_library("OSMesa") or find_library("EGL_mesa"))
CASES = {
    "discrete": OpenEnv(env_id="CartPole-v1", num_envs=3),
    "continuous": OpenEnv(env_id="Pendulum-v1", num_envs=3),
    "mujoco, two processes": OpenEnv(env_id="Hopper-v5", num_envs=3, num_processes=2),
    "metaworld": REACH,
    "pictures": OpenEnv(env_id="CartPole-v1", num_envs=3, picture=SMALL),
    "mujoco pictures, two processes": OpenEnv(
        env_id="InvertedPendulum-v5", num_envs=3, num_processes=2, picture=SMALL, options={"reset_noise_scale": 0.1}
    ),
    "maniskill": PUSH,
    "maniskill, two processes": msgspec.structs.replace(PUSH, env_id="PickCube-v1", num_processes=2),
    "libero": SOUP,
    "two images": OpenEnv(env_id="arm", num_envs=3, backend="two_cameras", num_processes=2),
    "world model": OpenEnv(env_id="CartPole-v1", num_envs=3, backend="world_model"),
    "world model, anywhere": OpenEnv(
        env_id="CartPole-v1", num_envs=3, backend="world_model", num_processes=2, options={"starts": "anywhere"}
    ),
}


LONG_CASES = {"continuous", "mujoco pictures, two processes", "world model, anywhere"}
"""Cases with simulators of other cases, opened in another way; only the long tests run them."""


def sims_dir(request: OpenEnv) -> Path:
    """Return the directory with the interpreter of a case; skip or fail the test if the interpreter is missing."""
    folder = ServiceSettings().sims_dir.expanduser()
    if request.backend not in ELSEWHERE:
        return OWN_SIMS if request.backend == "two_cameras" else NOWHERE
    if not (folder / request.backend / INSTALLED).exists():
        reason = f"no {request.backend} in {folder}: penstock sims install {request.backend}"
        if request.backend in os.environ.get("PENSTOCK_REQUIRE_SIMULATORS", "").split():
            pytest.fail(f"{reason}, which PENSTOCK_REQUIRE_SIMULATORS demands")
        pytest.skip(reason)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name,
            marks=SLOW_TO_START if one.backend in ELSEWHERE else [pytest.mark.long] if name in LONG_CASES else (),
        )
        for name, one in CASES.items()
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenEnv:
    if request.param.startswith("mujoco pictures") and NO_OPENGL:
        pytest.skip("no OpenGL library: apt-get install -y libosmesa6")
    found = CASES[request.param]
    if found.backend != "world_model":
        return found
    folder = world_model(tmp_path_factory.mktemp("model"))
    return msgspec.structs.replace(found, options={**found.options, "model": str(folder)})


def world_model(folder: Path) -> Path:
    """Fit a world model of CartPole to a few episodes, and write it to ``folder``; return the folder."""
    request = OpenEnv(env_id="CartPole-v1", num_envs=1)
    seen = record(request, NOWHERE, None, reset_ids=range(12), horizon=25)
    write_world_model(folder, fit(seen, Fitting(members=3, hidden_sizes=(16,), epochs=20)))
    return folder


@pytest.fixture(scope="module")
def simulator(case: OpenEnv) -> Iterator[Simulator]:
    opened = open_simulator(case, sims_dir(case))
    yield opened
    opened.close()


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvPool]:
    """Yield four environments in two processes: 0 and 1 in the first."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    request = OpenEnv(env_id="simulated_envs:Fragile-v0", num_envs=4, num_processes=2, step_limit_s=2.0)
    simulator = open_simulator(request, NOWHERE)
    yield EnvPool(simulator)
    simulator.close()


def ids(*numbers: int) -> NDArray[np.int32]:
    return np.asarray(numbers, np.int32)


def states(*numbers: int) -> NDArray[np.int64]:
    return np.asarray(numbers, np.int64)


def copied(observations: Named) -> Named:
    return {name: array.copy() for name, array in observations.items()}


def equal(one: Named, other: Named) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def row(observations: Named, i: int) -> Named:
    return {name: array[i] for name, array in observations.items()}


def random_actions(simulator: Simulator, seed: int, n: int, C: int = 1) -> NDArray[Any]:
    rng, spec = np.random.default_rng(seed), simulator.spec
    if spec.num_actions is not None:
        return rng.integers(0, spec.num_actions, (n, C, *spec.action_shape)).astype(spec.action_dtype)
    low, high = (np.reshape(bound, spec.action_shape) for bound in (spec.action_low, spec.action_high))
    return rng.uniform(low, high, (n, C, *spec.action_shape)).astype(spec.action_dtype)


def step(simulator: Simulator, env_ids: NDArray[np.int32], actions: NDArray[Any]) -> Chunk:
    chunk = simulator.step(env_ids, actions, None)
    assert chunk.lost == {}
    return chunk


def test_shapes_and_types_are_as_declared(simulator: Simulator) -> None:
    spec = simulator.spec
    assert spec.num_envs == 3
    started = simulator.reset(ids(2, 0), states(5, 6))
    for name, one in spec.observations.items():
        assert started.observations[name].shape == (2, *one.shape)
        assert started.observations[name].dtype == np.dtype(one.dtype)
    result = step(simulator, ids(0), random_actions(simulator, 0, 1, C=2))
    assert {name: array.shape for name, array in result.observations.items()} == {
        name: (1, *one.shape) for name, one in spec.observations.items()
    }
    assert result.rewards.shape == result.terminated.shape == result.success.shape == (1, 2)
    assert result.rewards.dtype == np.float32
    assert result.terminated.dtype == result.truncated.dtype == result.success.dtype == np.bool_


@pytest.mark.parametrize("state_id", [11, 5_000])
def test_the_state_id_alone_decides_the_episode(simulator: Simulator, state_id: int) -> None:
    """Equal state ids in several environments lead to equal states, observations and rewards."""
    started = simulator.reset(ids(0, 1, 2), states(state_id, state_id, state_id + 1))
    assert equal(row(started.observations, 0), row(started.observations, 1))
    assert not equal(row(started.observations, 0), row(started.observations, 2))
    assert started.state_hashes[0] == started.state_hashes[1] != started.state_hashes[2]
    first = copied(row(started.observations, 0))
    actions = random_actions(simulator, 1, 1, C=6)
    chunk = step(simulator, ids(0, 1), np.repeat(actions, 2, axis=0))
    assert equal(row(chunk.observations, 0), row(chunk.observations, 1))
    after = copied(row(chunk.observations, 0))
    again = simulator.reset(ids(2), states(state_id))
    assert equal(row(again.observations, 0), first)
    assert again.state_hashes[0] == started.state_hashes[0]
    repeated = step(simulator, ids(2), actions)
    assert equal(row(repeated.observations, 0), after)
    assert repeated.rewards.tolist() == chunk.rewards[:1].tolist()


def test_another_session_plays_the_same_episode(simulator: Simulator, case: OpenEnv) -> None:
    other = open_simulator(OpenEnv(**{**_fields(case), "num_envs": 1, "num_processes": 1}), sims_dir(case))
    try:
        here, there = (copied(one.reset(ids(0), states(77)).observations) for one in (simulator, other))
        assert equal(here, there)
        actions = random_actions(simulator, 2, 1, C=8)
        ours, theirs = (copied(step(one, ids(0), actions).observations) for one in (simulator, other))
        assert equal(ours, theirs)
    finally:
        other.close()


def _fields(request: OpenEnv) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("env_id", "backend", "options", "step_limit_s", "picture")}


@pytest.mark.parametrize(
    "name",
    [
        "discrete",
        "libero",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("pictures", "metaworld")),
    ],
)
def test_an_episode_is_filmed_and_goes_on_as_without_a_camera(name: str) -> None:
    """The film is an MP4 file of the newest episode; states and rewards are those of a simulator without a camera.

    Films of MuJoCo's own environments are in ``test_simulator_snapshots.py``.
    """
    if name not in ("discrete", "pictures") and NO_OPENGL:
        pytest.skip("no OpenGL library: apt-get install -y libosmesa6")
    request = OpenEnv(**{**_fields(CASES[name]), "num_envs": 1})
    where = sims_dir(request)
    plain, filmed = (open_simulator(msgspec.structs.replace(request, camera=on), where) for on in (False, True))
    try:
        assert "camera" in plain.film(0)[1], "a simulator without a camera films nothing"
        assert filmed.film(0) == (b"", "no episode was begun")
        actions = random_actions(plain, 4, 1, C=5)
        hashes = [one.reset(ids(0), states(8)).state_hashes.tolist() for one in (plain, filmed)]
        rewards = [step(one, ids(0), actions).rewards.tolist() for one in (plain, filmed)]
        assert (hashes[0], rewards[0]) == (hashes[1], rewards[1])
        data, reason = filmed.film(0)
        assert reason == ""
        assert data[4:8] == b"ftyp", "an MP4 file"
        assert data.index(b"moov") < data.index(b"mdat"), "it plays while it loads"
        assert filmed.film(0) == (b"", "the film was fetched")
    finally:
        plain.close()
        filmed.close()


@pytest.mark.parametrize(
    ("env_id", "picture", "reports"),
    [
        ("CartPole-v1", None, False),
        ("simulated_envs:Fragile-v0", None, True),
        ("simulated_envs:Solvable-v0", SMALL, True),
        ("simulated_envs:Late-v0", None, False),
    ],
)
def test_the_first_step_says_if_a_simulator_reports_success(
    monkeypatch: pytest.MonkeyPatch, env_id: str, picture: Picture | None, reports: bool
) -> None:
    """A simulator that reports success only at the end of an episode is described as one that does not."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    request = OpenEnv(env_id=env_id, num_envs=1, picture=picture)
    assert describe_simulator(request, NOWHERE).has_success is reports


def test_a_simulator_without_a_camera_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    blind = describe_simulator(OpenEnv(env_id="simulated_envs:Fragile-v0", num_envs=1, camera=True), NOWHERE)
    assert blind.no_video, "an environment that renders nothing"


@pytest.mark.long
def test_a_simulator_without_a_renderer_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "disable")
    dark = describe_simulator(msgspec.structs.replace(REACH, num_envs=1, camera=True), NOWHERE)
    assert dark.observations == {"state": ArraySpec((39,), "float64")}
    assert dark.no_video


def test_environments_that_are_not_named_do_not_move(simulator: Simulator) -> None:
    simulator.reset(ids(0, 1), states(1, 1))
    actions = random_actions(simulator, 3, 1, C=3)
    step(simulator, ids(0), actions)
    late = copied(step(simulator, ids(1), actions).observations)
    simulator.reset(ids(0), states(1))
    assert equal(late, step(simulator, ids(0), actions).observations)


def test_a_chunk_equals_its_actions_one_by_one(simulator: Simulator) -> None:
    simulator.reset(ids(0, 1), states(2, 2))
    actions = random_actions(simulator, 4, 1, C=5)
    chunk = step(simulator, ids(0), actions)
    singles = [step(simulator, ids(1), actions[:, c : c + 1]) for c in range(int(chunk.valid[0]))]
    assert chunk.rewards[0, : len(singles)].tolist() == [float(one.rewards[0, 0]) for one in singles]
    assert equal(chunk.observations, singles[-1].observations)


def test_episodes_end_once_and_begin_again(simulator: Simulator) -> None:
    limit = simulator.spec.max_episode_steps
    assert limit is not None
    simulator.reset(ids(1), states(3))
    chunk = step(simulator, ids(1), random_actions(simulator, 5, 1, C=limit + 1))
    ends = (chunk.terminated | chunk.truncated)[0]
    assert ends.sum() == 1
    assert not (chunk.terminated & chunk.truncated).any()
    assert chunk.valid.tolist() == [int(ends.argmax()) + 1], "nothing is executed after the end"
    assert not chunk.rewards[0, int(chunk.valid[0]) :].any()
    assert equal(chunk.final_observations, chunk.observations)
    simulator.reset(ids(1), states(4))
    after = step(simulator, ids(1), random_actions(simulator, 0, 1))
    assert not (after.terminated | after.truncated).any()


def test_the_next_episode_begins_in_the_same_request(simulator: Simulator) -> None:
    limit = simulator.spec.max_episode_steps
    assert limit is not None
    expected = simulator.reset(ids(0), states(9))
    first, state_hash = copied(expected.observations), int(expected.state_hashes[0])
    simulator.reset(ids(1), states(3))
    chunk = simulator.step(ids(1), random_actions(simulator, 5, 1, C=limit), states(9))
    assert equal(chunk.observations, first)
    assert not equal(chunk.final_observations, first)
    assert int(chunk.state_hashes[0]) == state_hash


@pytest.mark.long
def test_a_simulator_whose_process_is_killed_begins_again_alike(simulator: Simulator) -> None:
    """The episodes are reported lost with the reason; the replacing process plays the same episodes."""
    before = simulator.reset(ids(0), states(21))
    first, state_hash = copied(before.observations), int(before.state_hashes[0])
    kill_processes(simulator)
    chunk = simulator.step(ids(0), random_actions(simulator, 6, 1), None)
    assert "SIGKILL" in chunk.lost[0]
    assert not chunk.valid.any()
    again = simulator.reset(ids(0), states(21))
    assert again.lost == {}
    assert equal(again.observations, first)
    assert int(again.state_hashes[0]) == state_hash


def kill_processes(simulator: Simulator) -> None:
    """Kill the processes of a simulator's backend, and wait until they are dead."""
    children = processes_of(simulator)
    for child in children:
        child.kill()
    until = time.monotonic() + 60
    while any(is_alive(child) for child in children):
        assert time.monotonic() < until, children
        time.sleep(0.01)


def processes_of(simulator: Simulator) -> list[psutil.Process]:
    """Return the processes of a simulator's backend."""
    adapter = str(adapter_of(simulator.spec.backend, OWN_SIMS))
    children = [child for child in psutil.Process().children() if adapter in cmdline_of(child)]
    assert children
    return children


def cmdline_of(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:  # among them zombies
        return []


@pytest.mark.long
def test_a_simulator_that_hangs_is_replaced(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped processes are killed after the time limit, which is short for this step alone; their episodes are lost
    with the reason. The replacing process plays the same episodes.
    """
    everyone = ids(0, 1, 2)
    simulator.reset(everyone, states(22, 23, 24))  # of two processes, the test before may have killed one unnoticed
    before = simulator.reset(everyone, states(22, 23, 24))
    assert before.lost == {}
    first, state_hash = copied(row(before.observations, 0)), int(before.state_hashes[0])
    hung = processes_of(simulator)
    for child in hung:
        child.suspend()
    with monkeypatch.context() as patched:
        patched.setattr(simulator, "_limit_s", HANG_S)
        chunk = simulator.step(everyone, random_actions(simulator, 6, 3), None)
    assert chunk.lost == dict.fromkeys(range(3), f"the simulator's process hung for {HANG_S:g} s and was killed")
    assert not chunk.valid.any()
    assert not any(child.is_running() for child in hung)
    again = simulator.reset(ids(0), states(22))
    assert again.lost == {}
    assert equal(row(again.observations, 0), first)
    assert int(again.state_hashes[0]) == state_hash
    assert step(simulator, ids(0), random_actions(simulator, 6, 1)).valid.tolist() == [1]


@pytest.mark.long
async def test_a_repeated_request_is_executed_once(
    simulator: Simulator, case: OpenEnv, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client repeats requests over the bus, as it does when a reply is late, here while the first one is executed.

    The next step gives the observations of a simulator that executed each request once.
    """
    one, actions = ids(0), random_actions(simulator, 7, 1, C=3)
    request = msgspec.structs.replace(case, num_envs=1, num_processes=1)
    monkeypatch.setenv("PENSTOCK_SIMS_DIR", str(sims_dir(case)))
    async with run_env(bus) as service:
        opened = await open_session(bus, LONG_S, **msgspec.structs.asdict(request))

        async def ask(body: ResetRequest | StepRequest) -> bytes:
            """Send the request three times: twice at once, and once more after the replies. Return the reply."""
            at, data = subjects.env(opened.session), encode_env(body)
            replies = await asyncio.gather(*(bus.request(at, data, deadline_s=LONG_S) for _ in range(2)))
            replies.append(await bus.request(at, data, deadline_s=LONG_S))
            assert replies[0] == replies[1] == replies[2]
            return replies[0]

        async def act(seq: int, chunk: NDArray[Any]) -> StepReply:
            body = StepRequest(seq=seq, auto_reset=False, env_ids=one, actions=chunk, next_state_ids=states())
            return decode_env(await ask(body), StepReply)

        started = decode_env(await ask(ResetRequest(seq=0, env_ids=one, state_ids=states(31))), ResetReply)
        found = [await act(1, actions[:, :2]), await act(2, actions[:, 2:])]
        assert (started.episode_ids.tolist(), found[-1].lengths.tolist()) == ([0], [3])
        assert service.status()[JOB]["steps"] == 3
    assert equal(started.observations, simulator.reset(one, states(31)).observations)
    for reply, chunk in zip(found, (actions[:, :2], actions[:, 2:]), strict=True):
        expected = step(simulator, one, chunk)
        assert equal(reply.observations, expected.observations)
        assert reply.rewards.tolist() == expected.rewards.tolist()


def test_gymnasium_is_passed_through_exactly() -> None:
    simulator = open_simulator(CASES["discrete"], NOWHERE)
    env = gymnasium.make("CartPole-v1")
    expected, _ = env.reset(seed=42)
    assert np.array_equal(simulator.reset(ids(1), states(42)).observations["state"][0], expected)
    for t in range(200):
        result = step(simulator, ids(1), np.asarray([[t % 2]]))
        observation, reward, terminated, truncated, _ = env.step(t % 2)
        assert np.array_equal(result.observations["state"][0], observation)
        found = (result.rewards[0, 0], result.terminated[0, 0], result.truncated[0, 0])
        assert found == (reward, terminated, truncated)
        if terminated or truncated:
            break
    assert t > 5
    env.close()
    simulator.close()


def test_images_of_two_cameras_keep_their_names_and_rows(simulator_of_two: Simulator) -> None:
    """Observations of each environment equal those of the adapter in this process, also where an episode ends."""
    make = runpy.run_path(str(OWN_SIMS / "two_cameras" / "adapter.py"))["make"]
    order, seeds, following = ids(2, 0), states(5, 6), states(7, 8)
    alone = [make("arm", {"horizon": 3}) for _ in seeds]
    expected = [env.reset(int(seed)) for env, seed in zip(alone, seeds, strict=True)]
    assert equal(simulator_of_two.reset(order, seeds).observations, stacked(expected))
    actions = random_actions(simulator_of_two, 9, 2, C=3)
    seen = step(simulator_of_two, order, actions[:, :2]).observations
    for column in (0, 1):
        expected = [env.step(row[column])[0] for env, row in zip(alone, actions, strict=True)]
    assert equal(seen, stacked(expected))
    chunk = simulator_of_two.step(order, actions[:, 2:], following)
    final = [env.step(row[2])[0] for env, row in zip(alone, actions, strict=True)]
    assert equal(chunk.look(np.ones(2, np.bool_), final=True), stacked(final))
    assert equal(chunk.observations, stacked([env.reset(int(n)) for env, n in zip(alone, following, strict=True)]))
    images = [one.shape for one in simulator_of_two.spec.observations.values() if one.is_image]
    assert images == [(12, 16, 3), (6, 8, 1)], "policies read both through convolutions"


@pytest.fixture
def simulator_of_two() -> Iterator[Simulator]:
    request = msgspec.structs.replace(CASES["two images"], options={"horizon": 3})
    opened = open_simulator(request, OWN_SIMS)
    yield opened
    opened.close()


def stacked(rows: list[Named]) -> Named:
    return {name: np.stack([one[name] for one in rows]) for name in rows[0]}


@pytest.mark.long
def test_metaworld_gives_the_goals_of_its_benchmark() -> None:
    """State ids below 50 are the library's own tasks, bit for bit; the goals of higher ids differ from all of them."""
    import metaworld

    benchmark = metaworld.MT1("reach-v3", seed=0)
    env = benchmark.train_classes["reach-v3"]()
    simulator = open_simulator(REACH, NOWHERE)
    try:
        for state_id in (0, 49):
            env.set_task(benchmark.train_tasks[state_id])
            expected = [env.reset()[0], *(env.step(np.full(4, 0.5, np.float32))[0] for _ in range(3))]
            found = [simulator.reset(ids(0), states(state_id)).observations["state"][0].copy()]
            for _ in range(3):
                actions = np.full((1, 1, 4), 0.5, np.float32)
                found.append(step(simulator, ids(0), actions).observations["state"][0].copy())
            assert np.array_equal(found, expected)
        goals = [simulator.reset(ids(0), states(n)).observations["state"][0, -3:].tolist() for n in range(48, 56)]
        assert len({tuple(goal) for goal in goals}) == len(goals)
    finally:
        simulator.close()
        env.close()


EVERY_TASK = """
import json, runpy, sys
import metaworld
import numpy as np
make = runpy.run_path(sys.argv[1])["make"]
for name in sorted(metaworld.MT1.ENV_NAMES):
    env = make(name, {"horizon": 1})
    starts = [env.reset(state_id)["state"].tolist() for state_id in (0, 0, 77)]
    observations, reward, over, cut, success = env.step(np.full(4, 0.5, np.float32))
    after = observations["state"].tolist()
    print(json.dumps([name, starts, after, reward, over, cut, success, env.spec["action"][0], len(env.state())]))
    env.close()
"""


@pytest.mark.long
@pytest.mark.timeout(LONG_S)
def test_each_of_the_fifty_tasks_of_metaworld_begins_and_steps() -> None:
    """One process creates each task in turn, begins an episode of the benchmark twice and another, and steps it."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EVERY_TASK, str(BACKENDS["metaworld"])],
        capture_output=True, text=True, timeout=LONG_S, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len({name for name, *_ in found}) == len(found) == 50
    for name, (first, again, other), after, reward, over, cut, success, action, size in found:
        assert first == again, name
        assert first != other, name
        assert after != other, name
        assert [len(one) for one in (first, other, after)] == [39, 39, 39], name
        assert np.isfinite([*first, *other, *after, reward]).all(), name
        assert (over, cut) == (success, not success), name
        assert (action, size > 39 * 8) == ([4], True), name


@pytest.mark.long
@pytest.mark.parametrize("stops", [True, False])
def test_metaworld_ends_a_chunk_where_the_task_is_solved(stops: bool) -> None:
    """A proportional controller reaches the goal within a chunk: there the episode ends, and with it reward.

    With ``terminate_on_success: false`` the same chunk is executed to its end, and each action is rewarded.
    """
    request = OpenEnv(env_id="reach-v3", num_envs=1, backend="metaworld", options={"terminate_on_success": stops})
    simulator = open_simulator(request, NOWHERE)
    try:
        assert simulator.spec.has_success
        state = simulator.reset(ids(0), states(0)).observations["state"][0].copy()
        for _ in range(100):
            action = np.append(np.clip(10 * (state[-3:] - state[:3]), -1, 1), 0.0).astype(np.float32)
            chunk = step(simulator, ids(0), np.repeat(action[None, None], 6, axis=1))
            state = chunk.observations["state"][0].copy()
            if chunk.success.any():
                break
        first = int(chunk.success[0].argmax())
        assert 0 < first < 5, "success is neither at the first nor at the last action of the chunk"
        assert chunk.rewards[0, : first + 1].all()
        if stops:
            assert chunk.valid.tolist() == [first + 1]
            assert chunk.success.sum() == 1
            assert chunk.terminated.tolist() == chunk.success.tolist()
            assert not chunk.rewards[0, first + 1 :].any()
            assert equal(chunk.final_observations, chunk.observations)
        else:
            assert chunk.valid.tolist() == [6]
            assert not chunk.terminated.any()
            assert chunk.rewards[0, first + 1 :].all()
        assert not chunk.truncated.any()
    finally:
        simulator.close()


# -- ManiSkill and LIBERO --------------------------------------------------------------------------------------------


@SLOW_TO_START
@pytest.mark.parametrize("on_success", ["terminate", "truncate", "continue"])
def test_maniskill_ends_a_chunk_where_the_task_is_solved(on_success: str) -> None:
    """A controller moves behind the cube and pushes it to the goal; a chunk is longer than the rest of the episode."""
    options = {"control_mode": "pd_ee_delta_pos", "horizon": 80, "on_success": on_success}
    request = msgspec.structs.replace(PUSH, num_envs=1, options=options)
    simulator = open_simulator(request, sims_dir(request))
    try:
        state = simulator.reset(ids(0), states(3)).observations["state"][0].copy()
        assert simulator.spec.has_success
        behind = False
        for _ in range(40):
            hand, goal, cube = state[18:21], state[25:28], state[28:31]
            start = np.array([cube[0] - 0.1, cube[1], 0.02])
            behind |= bool(np.linalg.norm(start - hand) < 0.02)
            over = np.abs((start - hand)[:2]).max() > 0.03
            aim = np.array([goal[0], cube[1], 0.02]) if behind else np.array([*start[:2], 0.15]) if over else start
            action = np.append(np.clip((aim - hand) / 0.1, -1, 1), -1.0).astype(np.float32)
            chunk = step(simulator, ids(0), np.repeat(action[None, None], 2, axis=1))
            state = chunk.observations["state"][0].copy()
            if chunk.success.any():
                break
        first = int(chunk.success[0].argmax())
        ends = {"terminate": chunk.terminated, "truncate": chunk.truncated}
        if on_success == "continue":
            assert not chunk.terminated.any()
            assert not chunk.truncated.any()
            assert chunk.valid.tolist() == [2]
        else:
            assert chunk.success.tolist() == ends[on_success].tolist()
            assert chunk.valid.tolist() == [first + 1]
            assert not chunk.rewards[0, first + 1 :].any(), "nothing is paid after the end"
            assert equal(chunk.final_observations, chunk.observations)
        assert chunk.rewards[0, first] == 1.0
    finally:
        simulator.close()


REFUSED = """
import json, runpy, sys
make = runpy.run_path(sys.argv[1])["make"]
for env_id, options in json.loads(sys.argv[2]):
    try:
        make(env_id, options)
    except ValueError as error:
        print(json.dumps(f"refused: {error}"))
    else:
        print(json.dumps("made"))
"""


def refusals(request: OpenEnv, asked: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Send requests to an adapter in its interpreter, without standard input; return its error messages."""
    run = subprocess.run(
        [interpreter_of(request.backend, sims_dir(request)), "-c", REFUSED, str(BACKENDS[request.backend]),
         json.dumps(asked)],
        capture_output=True, text=True, timeout=LONG_S, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith('"')]


@SLOW_TO_START
def test_maniskill_says_what_it_lacks() -> None:
    """The error for missing assets names the command; the library's question on standard input gets no answer."""
    cases = {
        ("NoSuchTask-v1", None): "ManiSkill has no task 'NoSuchTask-v1'; it has: .*PushCube-v1",
        (
            "PutCarrotOnPlateInScene-v1",
            None,
        ): "assets are missing: .*bridge_v2_real2sim.*mani_skill.utils.download_asset",
        ("TwoRobotPickCube-v1", None): "tasks of several robots are not supported",
        ("PushCube-v1", "stop"): "on_success 'stop': it is one of terminate, truncate, continue",
    }
    asked = [(env_id, {} if value is None else {"on_success": value}) for env_id, value in cases]
    for answer, message in zip(refusals(PUSH, asked), cases.values(), strict=True):
        assert re.search(message, answer, re.DOTALL), answer


@SLOW_TO_START
def test_maniskill_films_where_vulkan_draws_and_says_so_elsewhere() -> None:
    spec = describe_simulator(msgspec.structs.replace(PUSH, num_envs=1, camera=True), sims_dir(PUSH))
    assert spec.observations["state"].dtype == "float32", "the simulator works either way"
    assert spec.no_video == "" or "ManiSkill draws with Vulkan, and no driver here can" in spec.no_video


@SLOW_TO_START
@pytest.mark.long
def test_libero_ends_a_chunk_where_its_goal_is_reached() -> None:
    """A controller takes the cream cheese, carries it over the basket, and opens the hand for one long chunk.

    The cheese falls into the basket within that chunk. Each executed action is rewarded for the hand's nearness.
    """
    options = {"assets": "primitive", "reach_reward": 0.5}
    request = msgspec.structs.replace(SOUP, env_id="libero_object/1", num_envs=1, options=options)
    simulator = open_simulator(request, sims_dir(request))
    try:
        started = simulator.reset(ids(0), states(3))
        assert started.tasks == ["pick the cream cheese and place it in the basket"]
        state, stage = started.observations["state"][0].copy(), 0
        while stage < len(CARRY):
            hand, cheese, basket = state[28:31], state[39:42], state[53:56]
            aim, grip, near = CARRY[stage](hand, cheese, basket)
            move = np.clip(7.5 * (aim - hand), -1, 1)
            action = np.asarray([*move, 0.0, 0.0, 0.0, grip], np.float32)
            chunk = step(simulator, ids(0), np.repeat(action[None, None], 4, axis=1))
            assert not (chunk.success | chunk.terminated | chunk.truncated).any(), f"stage {stage}"
            assert 0 < chunk.rewards.min() <= chunk.rewards.max() < 0.5
            state = chunk.observations["state"][0].copy()
            stage += bool(near(state[28:31], aim))
        opening = np.asarray([0.0] * 6 + [-1.0], np.float32)
        chunk = step(simulator, ids(0), np.repeat(opening[None, None], 20, axis=1))
        first = int(chunk.success[0].argmax())
        assert 0 < first < 19
        assert chunk.success.sum() == 1
        assert chunk.terminated.tolist() == chunk.success.tolist()
        assert not chunk.truncated.any()
        assert chunk.valid.tolist() == [first + 1]
        assert chunk.rewards[0, :first].all()
        assert chunk.rewards[0, first] > 1.0
        assert not chunk.rewards[0, first + 1 :].any(), "nothing is paid after the end"
        assert equal(chunk.final_observations, chunk.observations)
        mapped = [one.path for child in processes_of(simulator) for one in child.memory_maps()]
        assert any("libmujoco" in path for path in mapped)
        assert not any("libtorch" in path for path in mapped), "initial states are read without it"
    finally:
        simulator.close()


@SLOW_TO_START
def test_libero_begins_in_its_own_initial_states() -> None:
    """State ids below 50 are initial states of the suite, and higher ids are other positions; all differ."""
    simulator = open_simulator(SOUP, sims_dir(SOUP))
    try:
        seen = set()
        for first in (0, 3, 48, 51):
            started = simulator.reset(ids(0, 1, 2), states(first, first + 1, first + 2))
            assert started.lost == {}
            assert started.tasks == ["pick the alphabet soup and place it in the basket"] * 3
            seen |= set(started.state_hashes.tolist())
        assert len(seen) == 12
    finally:
        simulator.close()


@SLOW_TO_START
def test_libero_says_what_it_lacks() -> None:
    cases = {
        ("libero_object/0", ""): "meshes are not in .*libero-download-assets, or .*assets: FOLDER.*assets: primitive",
        ("libero_goal/1", "primitive"): "primitive assets for the tasks of libero_object alone",
        ("libero_goal/1", "/nonexistent"): "meshes are not in /nonexistent/assets",
        ("libero_object/77", "primitive"): "has no task '77'; it has: 0 pick_up_the_alphabet_soup",
        ("libero", ""): "no suite 'libero'; a task is SUITE/NUMBER or SUITE/NAME of: libero_spatial",
    }
    if list((sims_dir(SOUP) / "libero").glob("lib/*/site-packages/libero/libero/assets")):
        del cases[("libero_object/0", "")]  # this interpreter has the meshes
    asked = [(env_id, {"assets": assets} if assets else {}) for env_id, assets in cases]
    for answer, message in zip(refusals(SOUP, asked), cases.values(), strict=True):
        assert re.search(message, answer), answer


# -- what simulators do to their process -----------------------------------------------------------------------------


def reset_all(pool: EnvPool, *numbers: int) -> Any:
    return pool.reset(ResetRequest(seq=0, env_ids=np.arange(len(numbers), dtype=np.int32), state_ids=states(*numbers)))


def act(pool: EnvPool, *actions: int, auto_reset: bool = False) -> Any:
    request = StepRequest(
        seq=1,
        auto_reset=auto_reset,
        env_ids=np.arange(len(actions), dtype=np.int32),
        actions=np.asarray(actions, np.int64)[:, None],
        next_state_ids=np.zeros(0, np.int64),
    )
    return pool.step(request)


def test_named_observations_tasks_and_success_arrive(fragile: EnvPool) -> None:
    started = reset_all(fragile, 1, 2, 3, 4)
    assert started.tasks == ["count to four"] * 4
    assert started.observations["image"][:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    replies = [act(fragile, STEP, STEP, STEP, STEP) for _ in range(4)]
    assert [reply.succeeded.all() for reply in replies] == [False, False, True, True], "once, and still at the end"
    assert [reply.success.any() for reply in replies] == [False, False, True, False]
    assert replies[-1].final_observations["steps"].tolist() == [[4.0]] * 4


@pytest.mark.parametrize(
    ("action", "reason"),
    [(RAISE, "RuntimeError: the arm left the table"), (NOT_A_NUMBER, "observation 'steps' is not finite")],
)
def test_an_environment_that_breaks_loses_its_episode_alone(fragile: EnvPool, action: int, reason: str) -> None:
    reset_all(fragile, 1, 2, 3, 4)
    reply = act(fragile, STEP, action, STEP, STEP)
    assert reply.lost.tolist() == [False, True, False, False]
    assert reason in reply.reasons[1]
    assert (reply.valid.tolist(), reply.ended.any()) == ([1, 0, 1, 1], False)
    assert reset_all(fragile, 1, 2, 3, 4).lost.tolist() == [False] * 4, "it was created anew"


@pytest.mark.long
@pytest.mark.parametrize(("action", "reason"), [(DIE, "SIGKILL"), (HANG, "hung for 2 s")])
def test_a_process_that_dies_or_hangs_is_replaced(fragile: EnvPool, action: int, reason: str) -> None:
    """All episodes of the lost process are lost; those of the other process continue."""
    reset_all(fragile, 1, 2, 3, 4)
    reply = act(fragile, action, STEP, STEP, STEP)
    assert reply.lost.tolist() == [True, True, False, False]
    assert reason in reply.reasons[0]
    assert act_on(fragile, [2, 3]).lengths.tolist() == [2, 2]
    started = reset_all(fragile, 7, 8)
    assert (started.lost.any(), started.observations["image"][:, 0, 0, 0].tolist()) == (False, [7, 8])
    assert fragile.num_lost == 2


def act_on(pool: EnvPool, env_ids: list[int]) -> Any:
    actions = np.zeros((len(env_ids), 1), np.int64)
    return pool.step(
        StepRequest(
            seq=2, auto_reset=False, env_ids=ids(*env_ids), actions=actions, next_state_ids=np.zeros(0, np.int64)
        )
    )


def test_an_episode_that_does_not_begin_is_lost_with_its_reason(fragile: EnvPool) -> None:
    started = reset_all(fragile, 1, UNSTARTABLE, 3, 4)
    assert started.lost.tolist() == [False, True, False, False]
    assert started.reasons[1] == "RuntimeError: no scene for this seed"
    assert act_on(fragile, [0, 2, 3]).valid.tolist() == [1, 1, 1]


def test_a_prompt_of_a_library_reads_the_end_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator does not inherit the standard input of its service, on which it would wait for an answer."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    request = OpenEnv(env_id="simulated_envs:Fragile-v0", num_envs=1, step_limit_s=20.0)
    own, (reading, writing) = os.dup(0), os.pipe()
    try:
        os.dup2(reading, 0)
        with contextlib.closing(open_simulator(request, NOWHERE)) as simulator:
            assert reset_all(EnvPool(simulator), PROMPTING).reasons[0] == "EOFError: EOF when reading a line"
    finally:
        os.dup2(own, 0)
        for end in (own, reading, writing):
            os.close(end)


def test_the_processes_end_with_their_session_and_with_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(_children())
    simulator = open_simulator(OpenEnv(env_id="CartPole-v1", num_envs=2, num_processes=2), NOWHERE)
    assert len(set(_children()) - before) == 2
    simulator.close()
    assert set(_children()) <= before
    parent = os.fork()
    if parent == 0:  # a service that is killed with a session open
        open_simulator(OpenEnv(env_id="CartPole-v1", num_envs=1), NOWHERE)
        signal.pause()
    until = time.monotonic() + 30
    while not (orphans := [child.pid for child in psutil.Process(parent).children()]):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in orphans):
        assert time.monotonic() < until
        time.sleep(0.02)


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def test_a_process_that_cannot_come_back_says_why(fragile: EnvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    reset_all(fragile, 1, 2, 3, 4)
    act(fragile, DIE, STEP, STEP, STEP)
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    with pytest.raises(Unavailable, match=r"broke \(.*SIGKILL.*\) and does not start: .*simulated_envs"):
        reset_all(fragile, 1, 2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (OpenEnv(env_id="NoSuchTask-v1", num_envs=1), "'NoSuchTask-v1' of gymnasium: environment cannot be made"),
        (OpenEnv(env_id="CartPole-v1", num_envs=0), "a session holds 1 to 4096"),
        (OpenEnv(env_id="CartPole-v1", num_envs=40_000), "a session holds 1 to 4096"),
        (OpenEnv(env_id="CartPole-v1", num_envs=1, options={"no_such": 1}), "cannot be made.*no_such"),
        (OpenEnv(env_id="my_envs:Mine-v0", num_envs=1), r"my_envs.*: install what has 'my_envs' into .*/python[^`]*$"),
        (OpenEnv(env_id="FrozenLake-v1", num_envs=1), "only Box, or a Dict of Box, is supported"),
        (OpenEnv(env_id="CartPole-v1", num_envs=1, backend="warp"), "no simulator backend 'warp'"),
        (OpenEnv(env_id="x", num_envs=1, backend="isaac"), "no simulator backend 'isaac'.*Isaac Sim"),
        (OpenEnv(env_id="x", num_envs=1, backend="robotwin"), "RoboTwin: its repository.*--adapter FILE"),
        (OpenEnv(env_id="x", num_envs=1, backend="behavior"), "'behavior'.*BEHAVIOR-1K: Isaac Sim, .*--adapter FILE"),
        (OpenEnv(env_id="x", num_envs=1, backend="genesis"), "'genesis'.*Genesis: genesis-world, .*--adapter FILE"),
        (OpenEnv(env_id="x", num_envs=1, backend="calvin"), "'calvin'.*CALVIN: calvin_env with .*--adapter FILE"),
        (PUSH, "ModuleNotFoundError.*run `penstock sims install maniskill`"),
        (SOUP, "ModuleNotFoundError.*run `penstock sims install libero`"),
        (OpenEnv(env_id="x", num_envs=1, backend="world_model"), "options.model is missing: the folder that"),
        (
            OpenEnv(env_id="x", num_envs=1, backend="world_model", options={"model": "/nonexistent"}),
            "/nonexistent holds no world model, which `penstock sims world-model train` writes",
        ),
        (OpenEnv(env_id="x", num_envs=1, backend="world_model", options={"path": ""}), "no option 'path'"),
        (OpenEnv(env_id="fly-v3", num_envs=1, backend="metaworld"), "has no task 'fly-v3'; it has: .*reach-v3"),
        (OpenEnv(env_id="reach-v3", num_envs=1, backend="metaworld", options={"horizon": 501}), "1 to 500 steps"),
    ],
)
def test_an_environment_that_cannot_be_created_says_why(request_: OpenEnv, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_simulator(request_, NOWHERE)
