"""Snapshots: a stored episode continues bit for bit wherever it is restored; simulators without them say so."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import Named, Simulator, Started, open_simulator
from penstock.services.env.simulators.child import pack_values, unpack_values
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ProtocolError, Unsupported
from penstock.shared.protocol.embodied.environment import (
    OpenEnv,
    ResetRequest,
    RestoreRequest,
    SnapshotRequest,
    StepReply,
    StepRequest,
)
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
from tests.contract.simulated_envs import DEADLY, FOLDER
from tests.contract.test_simulators import (
    CASES,
    ELSEWHERE,
    NO_OPENGL,
    NOWHERE,
    SLOW_TO_START,
    copied,
    equal,
    ids,
    kill_processes,
    random_actions,
    row,
    sims_dir,
    states,
    step,
    world_model,
)
from tests.integration.test_env_service import run_env

WITHOUT = ("libero",)
"""Backends without snapshots."""
MORE = {
    # Their rewards compare positions that MuJoCo computed before the last step with those after the next one.
    "ant": OpenEnv(env_id="Ant-v5", num_envs=3),
    "humanoid": OpenEnv(env_id="Humanoid-v5", num_envs=3),
    # The states of these are tuples or views, and their goals are attributes.
    "acrobot": OpenEnv(env_id="Acrobot-v1", num_envs=3),
    "mountain car": OpenEnv(env_id="MountainCarContinuous-v0", num_envs=3),
    "pusher": OpenEnv(env_id="Pusher-v5", num_envs=3),
    # Their goals change MuJoCo's model, or are compared with pads of the gripper that move.
    "door": OpenEnv(env_id="door-open-v3", num_envs=3, backend="metaworld"),
    "peg": OpenEnv(env_id="peg-insert-side-v3", num_envs=3, backend="metaworld", num_processes=2),
    "pick": OpenEnv(env_id="pick-place-v3", num_envs=3, backend="metaworld", options={"expert": True}),
}
EVERY = CASES | MORE
SHORT_CASES = {"discrete", "mujoco, two processes", "world model", "acrobot"}
"""One case for each way to store a state; the long tests run the others."""
ALSO_ELSEWHERE = (CASES["discrete"], CASES["metaworld"])
"""Cases whose episodes are also continued in another session."""
BEFORE, AFTER = 7, 12
"""Numbers of actions before and after the snapshot; no episode of these cases ends earlier."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name,
            marks=SLOW_TO_START if one.backend in ELSEWHERE else () if name in SHORT_CASES else [pytest.mark.long],
        )
        for name, one in EVERY.items()
        if one.backend not in WITHOUT
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenEnv:
    if request.param.startswith("mujoco pictures") and NO_OPENGL:
        pytest.skip("no OpenGL library: apt-get install -y libosmesa6")
    found = EVERY[request.param]
    if found.backend != "world_model":
        return found
    folder = world_model(tmp_path_factory.mktemp("model"))
    return msgspec.structs.replace(found, options={**found.options, "model": str(folder)})


@pytest.fixture(scope="module")
def simulator(case: OpenEnv) -> Iterator[Simulator]:
    opened = open_simulator(case, sims_dir(case))
    yield opened
    opened.close()


Playback = tuple[Named, list[list[Any]], bytes]
"""Last observations, results of each action, and the snapshot at the end."""


def play(simulator: Simulator, env: int, actions: NDArray[Any]) -> Playback:
    """Execute ``actions`` [1, C, ...] one by one in a running episode, until it ends; return the playback."""
    played = []
    for c in range(actions.shape[1]):
        chunk = step(simulator, ids(env), actions[:, c : c + 1])
        results = (chunk.rewards, chunk.terminated, chunk.truncated, chunk.success)
        played.append([float(chunk.rewards[0, 0]), *(column.tolist() for column in results)])
        seen = copied(row(chunk.observations, 0))
        played[-1].append({name: array.tobytes() for name, array in seen.items()})
        if (chunk.terminated | chunk.truncated).any():
            break
    return seen, played, snapshot(simulator, env)


def snapshot(simulator: Simulator, env: int) -> bytes:
    stored = simulator.snapshot(ids(env))
    assert stored.lost == {}
    return stored.snapshots[0]


def restore(simulator: Simulator, env: int, data: bytes) -> Started:
    started = simulator.restore(ids(env), [data])
    assert started.lost == {}
    return started


def begin(simulator: Simulator, env: int, *, state: int = 61) -> NDArray[Any]:
    """Begin an episode and play its first actions; returns those that follow."""
    simulator.reset(ids(env), states(state))
    actions = random_actions(simulator, 8, 1, C=BEFORE + AFTER)
    play(simulator, env, actions[:, :BEFORE])
    return actions[:, BEFORE:]


def same(one: Playback, other: Playback) -> None:
    """Check that two playbacks have equal observations, rewards and flags, and equal final states, bit for bit."""
    assert one[1] == other[1]
    assert equal(one[0], other[0])
    assert one[2] == other[2]


@pytest.mark.long
def test_a_stored_episode_goes_on_alike_in_its_place_and_in_another(simulator: Simulator) -> None:
    """The other environment may be in the middle of an episode, and in another process if there are two."""
    assert simulator.spec.has_snapshots
    actions = begin(simulator, 0)
    stored = snapshot(simulator, 0)
    first = play(simulator, 0, actions)
    assert snapshot(simulator, 0) != stored
    begin(simulator, 2, state=4)
    hashes = set()
    for env in (0, 2):
        started = restore(simulator, env, stored)
        hashes.add(int(started.state_hashes[0]))
        assert snapshot(simulator, env) == stored, "what was restored is what was stored"
        same(first, play(simulator, env, actions))
        hashes.add(-int(restore(simulator, 1, snapshot(simulator, env)).state_hashes[0]))
    assert len(hashes) == 2, "one state at the snapshot, and one at the end"


def test_storing_an_episode_does_not_change_it(simulator: Simulator) -> None:
    actions = begin(simulator, 0)
    for _ in range(3):
        snapshot(simulator, 0)
    undisturbed = begin(simulator, 1)
    assert np.array_equal(actions, undisturbed)
    same(play(simulator, 0, actions), play(simulator, 1, undisturbed))


def test_the_first_state_of_an_episode_can_be_stored(simulator: Simulator) -> None:
    started = simulator.reset(ids(0), states(33))
    seen, state_hash = copied(row(started.observations, 0)), int(started.state_hashes[0])
    actions = random_actions(simulator, 9, 1, C=5)
    stored = snapshot(simulator, 0)
    first = play(simulator, 0, actions)
    again = restore(simulator, 0, stored)
    assert equal(row(again.observations, 0), seen)
    assert int(again.state_hashes[0]) == state_hash
    same(first, play(simulator, 0, actions))


@pytest.mark.long
def test_an_episode_goes_on_in_the_process_that_replaces_a_killed_one(simulator: Simulator, case: OpenEnv) -> None:
    """Some cases also continue it in a session of its own, as after the loss of an env worker."""
    actions = begin(simulator, 0)
    stored = snapshot(simulator, 0)
    first = play(simulator, 0, actions)
    kill_processes(simulator)
    assert "SIGKILL" in simulator.snapshot(ids(0)).lost[0]
    restore(simulator, 0, stored)
    same(first, play(simulator, 0, actions))
    if case not in ALSO_ELSEWHERE:
        return
    other = open_simulator(msgspec.structs.replace(case, num_envs=1, num_processes=1), sims_dir(case))
    try:
        restore(other, 0, stored)
        same(first, play(other, 0, actions))
    finally:
        other.close()


def test_episodes_whose_process_dies_in_a_later_restore_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own restore had succeeded before; the episodes of another process continue."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    request = OpenEnv(env_id="simulated_envs:Brittle-v0", num_envs=4, num_processes=2)
    simulator = open_simulator(request, NOWHERE)
    pool = EnvPool(simulator)
    try:
        pool.reset(ResetRequest(seq=0, env_ids=ids(0, 1), state_ids=states(5, 6)))
        pool.step(request_of(1, np.zeros((1, DEADLY), np.int64), 1))
        alive, deadly = simulator.snapshot(ids(0, 1)).snapshots
        started = simulator.restore(ids(0, 1, 2), [alive, deadly, alive])
        assert {row: "SIGKILL" in reason for row, reason in started.lost.items()} == {0: True, 1: True}
        assert started.state_hashes[:2].tolist() == [0, 0]
        assert started.observations["image"][2].tolist() == np.full((4, 4, 3), 5).tolist()
    finally:
        simulator.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["discrete", "mujoco, two processes", "metaworld"])
def test_an_episode_of_a_session_without_a_camera_is_filmed_where_it_goes_on(name: str) -> None:
    if name != "discrete" and NO_OPENGL:
        pytest.skip("no OpenGL library: apt-get install -y libosmesa6")
    request = msgspec.structs.replace(CASES[name], num_envs=1, num_processes=1)
    plain, filmed = (open_simulator(msgspec.structs.replace(request, camera=on), NOWHERE) for on in (False, True))
    try:
        actions = begin(plain, 0)
        stored = snapshot(plain, 0)
        expected = play(plain, 0, actions)[1]
        restore(filmed, 0, stored)
        assert play(filmed, 0, actions)[1] == expected
        data, reason = filmed.film(0)
        assert (reason, data[4:8]) == ("", b"ftyp")
    finally:
        plain.close()
        filmed.close()


@pytest.mark.parametrize(
    ("env_id", "names"), [("CartPole-v1", {"gymnasium", "numpy"}), ("Hopper-v5", {"gymnasium", "numpy", "mujoco"})]
)
def test_a_snapshot_names_the_versions_of_what_computes_the_episode(env_id: str, names: set[str]) -> None:
    """A simulator of other versions refuses the snapshot, because the episode might continue differently."""
    simulator = open_simulator(OpenEnv(env_id=env_id, num_envs=1), NOWHERE)
    try:
        assert simulator.spec.versions.keys() == names | {"python"}
        simulator.reset(ids(0), states(5))
        stored = snapshot(simulator, 0)
        for name in sorted(names):
            version = simulator.spec.versions[name].encode()
            assert version in stored
            other = stored.replace(version, b"9" * len(version))
            with pytest.raises(ProtocolError, match="made with another task, other options or other versions"):
                simulator.restore(ids(0), [other])
    finally:
        simulator.close()


# -- through EnvPool and the bus -------------------------------------------------------------------------------------


def request_of(seq: int, actions: NDArray[Any], *env_ids: int) -> StepRequest:
    return StepRequest(
        seq=seq, auto_reset=False, env_ids=ids(*env_ids), actions=actions, next_state_ids=np.zeros(0, np.int64)
    )


def episode_rows(reply: StepReply) -> list[Any]:
    return [reply.returns.tolist(), reply.lengths.tolist(), reply.succeeded.tolist(), reply.state_ids.tolist()]


def test_a_restored_episode_keeps_its_return_and_length() -> None:
    """A snapshot restored in three environments begins three new episodes in the middle of the stored one."""
    simulator = open_simulator(OpenEnv(env_id="Pendulum-v1", num_envs=3), NOWHERE)
    pool = EnvPool(simulator)
    try:
        pool.reset(ResetRequest(seq=0, env_ids=ids(0), state_ids=states(5)))
        pool.step(request_of(1, np.ones((1, 4, 1), np.float32), 0))
        stored = pool.snapshot(SnapshotRequest(seq=2, env_ids=ids(0)))
        gone_on = pool.step(request_of(3, np.ones((1, 1, 1), np.float32), 0))
        data, sizes = np.tile(stored.snapshots, 3), np.repeat(stored.sizes, 3)
        started = pool.restore(RestoreRequest(seq=4, env_ids=ids(0, 1, 2), snapshots=data, sizes=sizes))
        assert len(set(started.state_hashes.tolist())) == 1
        assert started.episode_ids.tolist() == [1, 2, 3]
        reply = pool.step(request_of(5, np.ones((3, 1, 1), np.float32), 0, 1, 2))
        assert episode_rows(reply) == [column * 3 for column in episode_rows(gone_on)]
        assert reply.lengths.tolist() == [5, 5, 5]
    finally:
        simulator.close()


def test_episodes_of_one_snapshot_are_not_followed_by_equal_ones() -> None:
    """After a restore the caller must name the next episodes, once."""
    simulator = open_simulator(OpenEnv(env_id="CartPole-v1", num_envs=3), NOWHERE)
    pool = EnvPool(simulator)

    def push(C: int, *following: int) -> StepReply:
        actions, n = np.ones((2, C), np.int64), states(*following)
        request = StepRequest(seq=1, auto_reset=True, env_ids=ids(0, 1), actions=actions, next_state_ids=n)
        return pool.step(request)

    try:
        pool.reset(ResetRequest(seq=0, env_ids=ids(0), state_ids=states(5)))
        stored = pool.snapshot(SnapshotRequest(seq=1, env_ids=ids(0)))
        data, sizes = np.tile(stored.snapshots, 2), np.repeat(stored.sizes, 2)
        pool.restore(RestoreRequest(seq=2, env_ids=ids(0, 1), snapshots=data, sizes=sizes))
        with pytest.raises(ProtocolError, match="next_state_ids: needed after a restore"):
            push(30)
        assert pool.num_steps == 0
        assert push(30, 70, 80).ended.all()
        assert push(30).state_ids.tolist() == [70, 80]
        assert push(1).state_ids.tolist() == [73, 83]
    finally:
        simulator.close()


@pytest.mark.parametrize("cut", [b"", b"PSN1", b"rubbish " * 20])
def test_an_invalid_snapshot_is_refused_and_starts_nothing(cut: bytes) -> None:
    """Random bytes, a truncated snapshot, and a snapshot of another task are refused."""
    first, other = (open_simulator(OpenEnv(env_id=name, num_envs=1), NOWHERE) for name in ("CartPole-v1", "Acrobot-v1"))
    pool, stranger = EnvPool(first), EnvPool(other)
    try:
        for one in (pool, stranger):
            one.reset(ResetRequest(seq=0, env_ids=ids(0), state_ids=states(5)))
        own, foreign = (
            one.snapshot(SnapshotRequest(seq=1, env_ids=ids(0))).snapshots.tobytes() for one in (pool, stranger)
        )
        for wrong in (cut, own[:-8], own + bytes(8), foreign):
            data = np.frombuffer(wrong, np.uint8)
            with pytest.raises(ProtocolError, match="snapshot"):
                pool.restore(RestoreRequest(seq=2, env_ids=ids(0), snapshots=data, sizes=states(data.size)))
        data = np.frombuffer(own, np.uint8)
        reply = pool.restore(RestoreRequest(seq=2, env_ids=ids(0), snapshots=data, sizes=states(data.size)))
        assert not reply.lost.any()
    finally:
        first.close()
        other.close()


def test_sizes_that_are_not_those_of_the_snapshots_are_refused() -> None:
    simulator = open_simulator(OpenEnv(env_id="CartPole-v1", num_envs=3), NOWHERE)
    pool = EnvPool(simulator)
    try:
        pool.reset(ResetRequest(seq=0, env_ids=ids(0), state_ids=states(5)))
        data = pool.snapshot(SnapshotRequest(seq=1, env_ids=ids(0))).snapshots
        most, n = 2**63 - 1, data.size
        for snapshots, sizes in (
            (data, states(most, most, n + 2)),  # their sum in 64 bits is n
            (np.tile(data, 3), states(4 * n, n, -2 * n)),
            (np.tile(data, 3), states(n, 2 * n)),
            (np.tile(data, 3), states(n, n, n)[None]),
            (np.tile(data, (3, 1)), states(n, n, n)),
        ):
            with pytest.raises(ProtocolError, match="sizes: the length of one snapshot per environment is needed"):
                pool.restore(RestoreRequest(seq=2, env_ids=ids(0, 1, 2), snapshots=snapshots, sizes=sizes))
        request = RestoreRequest(seq=2, env_ids=ids(0, 1, 2), snapshots=np.tile(data, 3), sizes=states(n, n, n))
        assert not pool.restore(request).lost.any()
    finally:
        simulator.close()


def test_values_come_back_as_they_were() -> None:
    values = {"a": (1, [2.5, None, "text"]), "b": {"c": np.arange(3.0), "d": np.float32(0.1)}, "e": np.zeros((0, 2))}
    found = unpack_values(pack_values(values))
    assert (found["a"], found["b"]["d"], found["b"]["d"].dtype) == ((1, [2.5, None, "text"]), np.float32(0.1), "f4")
    assert (found["b"]["c"].tolist(), found["e"].shape) == ([0, 1, 2], (0, 2))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"values": [{"array": 0}, {"array": 0}], "arrays": [["<f8", [1]]]}, "an array stands there twice"),
        ({"values": [{"scalar": 0}, {"array": -1}], "arrays": [["<f8", [1]]]}, "an array stands there twice"),
        ({"values": [{"array": 0}, {"array": 1}], "arrays": [["<f8", [-1]], ["<f8", [-1]]]}, "a negative size"),
    ],
)
def test_a_small_message_does_not_become_large_values(header: dict[str, Any], reason: str) -> None:
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with pytest.raises(ValueError, match=reason):
        unpack_values(struct.pack("<II", len(head), 8) + head + bytes(8))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1: 2.0}, "the key 1 is no text"),
        ({("a", 0): 1}, "the key .* is no text"),
        (np.zeros(2, [("x", "<f4"), ("y", "<i8")]), "an array of .*'x'"),
        (np.zeros(1, [("x", "<f4")])[0], "an array of .*'x'"),
        (np.asarray([None]), "an array of object"),
        ({"a": {1, 2}}, "a set"),
    ],
)
def test_values_that_would_come_back_otherwise_are_not_stored(value: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"{reason}.* has no place in a snapshot"):
        pack_values({"value": value})


@pytest.mark.parametrize("name", ["Fragile-v0", "Stacked-v0"])
def test_a_simulator_without_snapshots_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One case is an environment of Gymnasium's own in a wrapper that stacks observations."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    simulator = open_simulator(OpenEnv(env_id=f"simulated_envs:{name}", num_envs=1), NOWHERE)
    pool = EnvPool(simulator)
    try:
        assert not simulator.spec.has_snapshots
        pool.reset(ResetRequest(seq=0, env_ids=ids(0), state_ids=states(5)))
        with pytest.raises(Unsupported, match=f"'simulated_envs:{name}' of gymnasium has no snapshots"):
            pool.snapshot(SnapshotRequest(seq=1, env_ids=ids(0)))
        nothing = np.zeros(0, np.uint8)
        with pytest.raises(Unsupported):
            pool.restore(RestoreRequest(seq=1, env_ids=ids(0), snapshots=nothing, sizes=states(0)))
        assert pool.step(request_of(1, np.zeros((1, 1), np.int64), 0)).lengths.tolist() == [1], "nothing has happened"
    finally:
        simulator.close()


async def test_an_episode_is_stored_and_goes_on_in_another_session_over_the_bus(bus: Bus, tmp_path: Path) -> None:
    """A client that loses its session continues its episodes in the next one."""
    settings = ServiceSettings(shm_dir=tmp_path)
    request, actions = OpenEnv(env_id="CartPole-v1", num_envs=2), np.asarray([[0, 1, 1], [1, 0, 0]])
    async with run_env(bus) as service:
        async with asyncio.timeout(60):
            while not service.ready:
                await asyncio.sleep(0.02)
        with FrameMail(settings) as mail:
            client = await EnvClient.open(bus, mail, request, job="job_snapshots")
            assert client.spec.has_snapshots
            await client.reset(ResetRequest(seq=client.seq, env_ids=ids(0, 1), state_ids=states(3, 4)))
            await client.step(request_of(client.seq, actions[:, :2], 0, 1))
            stored = await client.snapshot(ids(0, 1))
            expected = await client.step(request_of(client.seq, actions, 0, 1))
            known = copied(expected.observations), episode_rows(expected)
            await client.close()
            client = await EnvClient.open(bus, mail, request, job="job_snapshots")
            started = await client.restore(ids(0, 1), stored)
            assert not started.lost.any()
            reply = await client.step(request_of(client.seq, actions, 0, 1))
            assert equal(reply.observations, known[0])
            assert episode_rows(reply) == known[1]
            await client.close()
