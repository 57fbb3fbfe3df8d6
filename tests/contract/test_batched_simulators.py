"""Simulators that step all environments of a process in one object, as ``make_batch`` of their adapter offers.

The world model, which is one, also runs the whole contract of ``test_simulators.py``.
"""

from __future__ import annotations

import json
import runpy
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.services.env.pool import EnvPool
from penstock.services.env.simulators import BACKENDS, Simulator, interpreter_of, open_simulator
from penstock.shared.errors import ConfigError, ProtocolError
from penstock.shared.protocol.embodied.environment import (
    OpenEnv,
    ResetReply,
    ResetRequest,
    RestoreRequest,
    SnapshotRequest,
    StepReply,
    StepRequest,
)
from tests.contract.test_simulators import (
    LONG_S,
    NOWHERE,
    OWN_SIMS,
    PUSH,
    SLOW_TO_START,
    copied,
    ids,
    processes_of,
    random_actions,
    row,
    sims_dir,
    states,
    step,
)

DOWN, UP, RAISE, NOT_A_NUMBER = range(4)
UNSTARTABLE = 666
COUNTERS = OpenEnv(env_id="count", num_envs=5, backend="counters", options={"apart": False, "horizon": 9})
ON_A_GPU = msgspec.structs.replace(PUSH, num_envs=4, options={"horizon": 20, "sim_backend": "physx_cuda"})
Opener = Callable[..., Simulator]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Open simulators, and close them after the test."""
    simulators = []

    def opens(request: OpenEnv = COUNTERS, **changes: Any) -> Simulator:
        changed = msgspec.structs.replace(request, options=request.options | changes)
        simulators.append(open_simulator(changed, OWN_SIMS if request.backend == "counters" else sims_dir(request)))
        return simulators[-1]

    yield opens
    for simulator in simulators:
        simulator.close()


def reset(pool: EnvPool, env_ids: NDArray[np.int32], state_ids: NDArray[np.int64]) -> ResetReply:
    return pool.reset(ResetRequest(seq=0, env_ids=env_ids, state_ids=state_ids))


def act(
    pool: EnvPool, env_ids: NDArray[np.int32], actions: Any, next_states: NDArray[np.int64] | None = None
) -> StepReply:
    following = states() if next_states is None else next_states
    return pool.step(
        StepRequest(
            seq=1, auto_reset=next_states is not None, env_ids=env_ids, actions=np.asarray(actions, np.int64),
            next_state_ids=following,
        )
    )  # fmt: skip


def plain(reply: ResetReply | StepReply) -> dict[str, Any]:
    """Return the fields of a reply as lists."""
    fields = {name: getattr(reply, name) for name in reply.__dataclass_fields__}
    named = {name: fields.pop(name) for name in ("observations", "final_observations") if name in fields}
    flat = {f"{field} {name}": array for field, arrays in named.items() for name, array in arrays.items()}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in {**fields, **flat}.items()
    }


def test_a_batch_plays_like_environments_of_their_own(opened: Opener) -> None:
    """Random requests to some of the environments, with chunks in which episodes end at different steps."""
    together, apart = (EnvPool(opened(apart=alone)) for alone in (False, True))
    everyone, rng = np.arange(5, dtype=np.int32), np.random.default_rng(0)
    assert plain(reset(together, everyone, states(*range(5)))) == plain(reset(apart, everyone, states(*range(5))))
    ended = 0
    for _ in range(60):
        some = rng.permutation(everyone)[: rng.integers(1, 6)]
        actions = rng.choice([DOWN, UP, UP], (len(some), rng.integers(1, 6)))
        following = rng.integers(0, 1000, len(some))
        one, other = (act(pool, some, actions, following) for pool in (together, apart))
        assert plain(one) == plain(other)
        ended += int(one.ended.sum())
    assert ended > 20


def test_an_error_of_a_batch_loses_the_episodes_of_all(opened: Opener) -> None:
    """Those that ended before it in the same chunk are kept. The process lives, and creates the object again."""
    simulator = opened()
    pool, process = EnvPool(simulator), processes_of(simulator)
    reset(pool, ids(0, 1, 2, 3), states(1, 2, 3, 4))
    act(pool, ids(0), [[UP, UP, UP]])
    reply = act(pool, ids(1, 0), [[UP, RAISE], [UP, UP]], states(8, 9))
    assert (reply.lost.tolist(), reply.ended.tolist()) == ([True, False], [False, True])
    assert reply.reasons == ["RuntimeError: a counter broke", ""]
    assert (reply.valid.tolist(), reply.rewards.tolist()) == ([0, 1], [[0, 0], [4, 0]])
    assert reply.observations["steps"][1].tolist() == [0, 9], "the next episode of environment 0 began in a new object"
    broke = "the simulator of all environments broke: RuntimeError: a counter broke"
    later = act(pool, ids(2, 0), [[UP], [UP]])
    assert (later.lost.tolist(), later.reasons) == ([True, False], [broke, ""])
    stored = pool.snapshot(SnapshotRequest(seq=2, env_ids=ids(3, 0)))
    assert (stored.lost.tolist(), stored.reasons) == ([True, False], [broke, ""])
    assert not reset(pool, ids(1, 2, 3), states(2, 3, 4)).lost.any()
    again = act(pool, ids(0, 1, 2, 3), [[UP]] * 4)
    assert (again.lengths.tolist(), again.lost.any()) == ([2, 1, 1, 1], False)
    assert processes_of(simulator) == process


def test_an_episode_that_cannot_begin_breaks_the_batch(opened: Opener) -> None:
    pool = EnvPool(opened())
    reset(pool, ids(0), states(1))
    started = reset(pool, ids(1, 2), states(5, UNSTARTABLE))
    assert started.lost.tolist() == [True, True]
    assert started.reasons == ["RuntimeError: no counter begins there"] * 2
    assert "no counter begins there" in act(pool, ids(0), [[UP]]).reasons[0]
    assert not reset(pool, ids(0, 1), states(1, 5)).lost.any()


def test_a_number_that_is_not_finite_loses_one_episode_of_a_batch(opened: Opener) -> None:
    pool = EnvPool(opened())
    reset(pool, ids(0, 1, 2), states(1, 2, 3))
    reply = act(pool, ids(0, 1, 2), [[UP], [NOT_A_NUMBER], [UP]])
    assert reply.lost.tolist() == [False, True, False]
    assert "observation 'count' is not finite" in reply.reasons[1]
    assert act(pool, ids(0, 2), [[UP], [UP]]).lengths.tolist() == [2, 2]
    assert not reset(pool, ids(1), states(2)).lost.any()
    assert not pool.snapshot(SnapshotRequest(seq=2, env_ids=ids(0, 1))).lost.any()


def test_an_environment_of_a_batch_continues_from_a_snapshot(opened: Opener) -> None:
    """Also in a session whose environments are apart."""
    together, apart = (EnvPool(opened(apart=alone)) for alone in (False, True))
    reset(together, ids(0, 1), states(1, 2))
    act(together, ids(0, 1), [[UP, UP], [DOWN, UP]])
    stored = together.snapshot(SnapshotRequest(seq=2, env_ids=ids(1)))
    expected = act(together, ids(1), [[UP, UP]])
    request = RestoreRequest(seq=3, env_ids=ids(4), snapshots=stored.snapshots, sizes=stored.sizes)
    assert not together.restore(request).lost.any()
    found = act(together, ids(4), [[UP, UP]])
    for name in ("observations count", "observations steps", "rewards", "returns", "lengths"):
        assert plain(found)[name] == plain(expected)[name]
    with pytest.raises(ProtocolError, match="other options"):
        apart.restore(request)


# -- ManiSkill on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_physics_on_a_gpu_are_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter looks for a GPU before it needs the simulator's packages."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"sim_backend physx_cuda needs an NVIDIA GPU, and PyTorch .* finds none"):
        open_simulator(ON_A_GPU, NOWHERE)


def test_maniskill_knows_two_places_for_its_physics() -> None:
    threads = torch.get_num_threads()
    adapter = runpy.run_path(str(BACKENDS["maniskill"]))
    torch.set_num_threads(threads)  # the adapter takes one, for its own process
    assert adapter["make_batch"]("PushCube-v1", {}, 4) is None
    assert adapter["make_batch"]("PushCube-v1", {"sim_backend": "physx_cpu"}, 4) is None
    for backend in ("gpu", "physx_cuda:x", 1):
        with pytest.raises(ValueError, match="it is physx_cpu, physx_cuda, or physx_cuda:N for the GPU N"):
            adapter["make_batch"]("PushCube-v1", {"sim_backend": backend}, 4)
    with pytest.raises(ValueError, match="physx_cuda has neither images nor videos"):
        adapter["make_with_camera"]("PushCube-v1", {"sim_backend": "physx_cuda:1"})


ON_A_CPU = """
import json, runpy, sys
import numpy as np
module = runpy.run_path(sys.argv[1])
options = {"horizon": 12, "control_mode": "pd_joint_target_delta_pos"}
alone = module["ManiSkillEnvironment"]("PushCube-v1", **options)
batch = module["ManiSkillBatch"]("PushCube-v1", 1, **options)
me, nobody = np.zeros(1, np.int32), np.zeros(0, np.int32)
actions = np.random.default_rng(0).uniform(-1, 1, (12, 8)).astype(np.float32)
found = {"specs": [alone.spec, batch.spec], "starts": [], "steps": [], "paused": []}
for state_id in (5, 6):
    seen = batch.reset(me, np.array([state_id]))
    found["starts"].append([alone.reset(state_id)["state"].tolist(), seen["state"][0].tolist()])
    for action in actions:
        seen, *rest = alone.step(action)
        rows, *columns = batch.step(me, action[None])
        both = [seen["state"].tolist(), *rest], [rows["state"][0].tolist(), *(column[0].item() for column in columns)]
        found["steps"].append(both)
expected = [alone.reset(7)["state"], *(alone.step(action)[0]["state"] for action in actions[:8])]
batch._still_A = actions[0]  # moves the targets of the controllers, too
batch.reset(me, np.array([7]))
for t, action in enumerate(actions[:8]):
    seen = batch.step(me, action[None])[0]["state"][0]
    found["paused"].append(float(np.abs(seen - expected[t + 1]).max()))
    for _ in range(3 * (t == 3)):  # the scene moves, but not the episode
        batch.step(nobody, np.zeros((0, 8), np.float32))
found["hashes"] = []
for state_id in (7, 8, 7):
    batch.reset(me, np.array([state_id]))
    found["hashes"].append(batch.states(me)[0].hex())
for env_id in ("PegInsertionSide-v1", "TwoRobotPickCube-v1"):
    try:
        module["ManiSkillBatch"](env_id, 1)
    except ValueError as error:
        found[env_id] = str(error)
print(json.dumps(found))
"""


@SLOW_TO_START
def test_a_maniskill_batch_plays_like_one_environment() -> None:
    """On the CPU, where a batch has one environment: the same starts and steps, bit for bit.

    While no environment is named, the scene moves, but the episode does not: it goes on within a ten-thousandth.
    """
    run = subprocess.run(
        [interpreter_of("maniskill", sims_dir(PUSH)), "-W", "ignore", "-c", ON_A_CPU, str(BACKENDS["maniskill"])],
        capture_output=True, text=True, timeout=LONG_S, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads(run.stdout.splitlines()[-1])
    one, other = found["specs"]
    assert other == one | {"snapshots": False, "versions": one["versions"] | {"sim_backend": "physx_cpu"}}
    for alone, batch in [*found["starts"], *found["steps"]]:
        assert alone == batch
    assert found["steps"][11][1][2:] == [False, True, False], "truncated at the horizon"
    assert found["paused"][:4] == [0.0] * 4
    assert max(found["paused"]) < 1e-4
    assert found["hashes"][0] == found["hashes"][2] != found["hashes"][1]
    assert "builds other objects for other seeds" in found["PegInsertionSide-v1"]
    assert "tasks of several robots are not supported" in found["TwoRobotPickCube-v1"]


@pytest.mark.gpu
@SLOW_TO_START
def test_the_state_id_decides_an_episode_on_a_gpu(opened: Opener) -> None:
    """Equal ids give equal hashes and, up to rounding, equal episodes in any environment, whatever the others do."""
    simulator = opened(ON_A_GPU)
    started = simulator.reset(ids(0, 1, 2, 3), states(5, 5, 6, 7))
    first = copied(row(started.observations, 0))
    hashes = started.state_hashes.tolist()
    assert hashes[0] == hashes[1] != hashes[2]
    np.testing.assert_allclose(started.observations["state"][1], first["state"], atol=1e-3)
    actions = random_actions(simulator, 1, 1, C=6)
    chunk = step(simulator, ids(0, 1), np.repeat(actions, 2, axis=0))
    after = copied(row(chunk.observations, 0))
    np.testing.assert_allclose(chunk.observations["state"][1], after["state"], atol=1e-2)
    again = simulator.reset(ids(3), states(5))
    assert again.state_hashes.tolist() == hashes[:1]
    np.testing.assert_allclose(again.observations["state"][0], first["state"], atol=1e-3)
    repeated = step(simulator, ids(3), actions)
    np.testing.assert_allclose(repeated.observations["state"][0], after["state"], atol=1e-2)
    np.testing.assert_allclose(repeated.rewards[0], chunk.rewards[0], atol=1e-2)


@pytest.mark.gpu
@SLOW_TO_START
def test_environments_on_a_gpu_wait_while_others_are_stepped(opened: Opener) -> None:
    simulator = opened(ON_A_GPU)
    actions = random_actions(simulator, 2, 1, C=8)
    simulator.reset(ids(0), states(5))
    expected = copied(step(simulator, ids(0), actions).observations)
    simulator.reset(ids(1, 2), states(5, 9))
    step(simulator, ids(1), actions[:, :4])
    step(simulator, ids(2), random_actions(simulator, 3, 1, C=8))
    simulator.reset(ids(3), states(4))
    found = step(simulator, ids(1), actions[:, 4:])
    np.testing.assert_allclose(found.observations["state"], expected["state"], atol=1e-2)


@pytest.mark.gpu
@SLOW_TO_START
def test_episodes_on_a_gpu_end_at_their_own_steps(opened: Opener) -> None:
    """Environments that begin later are truncated later, in chunks of the same requests."""
    simulator = opened(ON_A_GPU)
    simulator.reset(ids(0, 1), states(1, 2))
    step(simulator, ids(0), random_actions(simulator, 4, 1, C=5))
    chunk = step(simulator, ids(0, 1), random_actions(simulator, 5, 2, C=18))
    assert chunk.valid.tolist() == [15, 18]
    assert chunk.truncated.any(axis=1).tolist() == [True, False]
