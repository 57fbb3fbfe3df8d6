"""Embodied jobs through all services: they learn, the audit passes, a replay is equal, and any process may die."""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import yaml

from penstock.local.recording import record
from penstock.services.coordinator.leader.leader_rpc import COORDINATOR
from penstock.services.trainer.checkpoint.state import read_manifest, save_checkpoint
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.data.demonstrations import write_demonstrations
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.environment import EnvSpec, OpenEnv
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Dropped,
    Extended,
    Finished,
    JobStarted,
    LineageForked,
)
from penstock.shared.runtime.lease import LeaseRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

JOB: dict[str, Any] = {
    "kind": "embodied",
    "name": "cartpole",
    "environment": {"task": "CartPole-v1", "horizon": 100, "num_envs": 4, "sessions": 2, "bytes_per_step": 256},
    "policy": {"type": "categorical", "hidden_sizes": [16]},
    "algorithm": {"type": "ppo", "epochs": 2, "minibatches": 2, "value_hidden_sizes": [16]},
    "train": {"batch_size": 8, "max_updates": 6, "max_lag": 1, "draw_timeout_s": 15},
    "evaluation": {"episodes": 4},
    "checkpoint": {"every": 3},
    "limits": {"byte_budget": 4 << 20},
}
SERVICES = ("coordinator-0", "rollout-0", "env-0", "trainer-0")
EXAMPLES = Path(__file__).parents[2] / "examples"
VICTIMS = ("simulators", *SERVICES, "nats")
ENDLESS = ("train.max_updates=100000", "train.max_lag=0", "checkpoint.every=5", "environment.horizon=200")
FURTHER, LAST = 3, 12
"""Updates between two faults, and after the last fault; the status may be half a second old."""
CUT = "connection to NATS at"
RESET_LIMIT_S = 230.0
"""Longer than a rollout worker waits for a reset of its simulators."""
BROKEN = "RuntimeError: the arm has lost its base"
"""Error that a reset of ``e2e_simulators:Arm-v0`` raises."""
FEW_FAILURES = 10
"""Lost groups in a row after which a job with four groups a batch goes on; sixteen end it."""
STALL_S = 5.0
"""Longer than the leases of the trainer and the coordinator."""


def submit(stack: Any, *changes: str) -> str:
    """Submit the job above with changes; return its id."""
    job: str = stack.client.submit(with_overrides(copy.deepcopy(JOB), list(changes))).id
    return job


def test_a_policy_in_a_simulator_is_trained_like_any_other(stack: Any) -> None:
    job = submit(stack)
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", 6), record.status
    audit = stack.check_audit(job)
    assert audit["equation"]["trained"] == 48
    stack.check_replay(job, at_least=6)
    described = next(event for event in stack.ledger(job) if isinstance(event, JobStarted)).environment
    assert (described["env_id"], described["num_actions"]) == ("CartPole-v1", 2)
    series = stack.client.metrics(job)["series"]
    assert all(0 < length <= 100 for length in series["episode/length"] if length is not None)
    assert [value for value in series["eval/length"] if value is not None], "held-out episodes at the start and the end"
    first = next(value for value in series["mismatch/kl"] if value is not None)
    assert abs(first) < 1e-6, "trainer and rollout worker compute the same log-probs for version 0"
    shown = stack.cli("samples", job, "--json")
    assert "CartPole" in stack.cli("describe", job).output
    assert shown.exit_code == 0, shown.output
    one = stack.client.samples(job, limit=1)[0]
    assert one.completion.endswith(f"{one.tokens} steps"), one
    assert one.reward == one.tokens, "CartPole pays 1 a step"


@pytest.mark.long
def test_groups_in_which_all_episodes_fail_are_replaced(stack: Any) -> None:
    """No arm reaches its goal in four steps, and the dense returns of Meta-World differ: success decides, not returns.

    Each batch replaces two groups, as many as it may, and then trains two others like them.
    """
    job = submit(
        stack, "environment={backend: metaworld, task: reach-v3, horizon: 4, num_envs: 4, sessions: 1}",
        "policy.type=gaussian", "algorithm={type: grpo, group_size: 2, dynamic_sampling: {max_resampled: 1}}",
        "train={batch_size: 4, max_updates: 2, max_lag: 0, draw_timeout_s: 60}", "evaluation.episodes=0",
    )  # fmt: skip
    record = stack.finish(job, 120)
    assert (record.status.phase, record.status.step) == ("succeeded", 2), record.status
    events = stack.ledger(job)
    assert next(event for event in events if isinstance(event, JobStarted)).environment["has_success"]
    groups = list(stack.groups(job).values())
    assert len(groups) == 4, "replaced groups are deleted"
    assert not any(group.succeeded.any() for group in groups)
    assert all(len(set(group.returns.tolist())) == 2 for group in groups)
    dropped = [event for event in events if isinstance(event, Dropped) and event.reason == "no_signal"]
    assert not any(event.redraw for event in dropped), "other ordinals replace them"
    assert sum(len(event.draws) for event in dropped) == 4
    equation = stack.check_audit(job)["equation"]
    assert (equation["trained"], equation["dropped"]["no_signal"]) == (4, 4)
    series = stack.client.metrics(job)["series"]
    assert [value for value in series["resample_ratio"] if value is not None] == [1.0, 1.0]
    stack.check_replay(job, at_least=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("environment.task=CartPole-v99", "CartPole-v99"),
        ("environment.backend=isaac", "Isaac Lab: isaaclab with Isaac Sim"),
        ("policy.type=gaussian", "is one of 2 actions; use categorical"),
        ("policy.observations=[image]", "has no observation 'image'; it has: state"),
        ("environment.bytes_per_step=64", "raise it to at least that"),
    ],
)
def test_a_job_that_does_not_fit_its_simulator_is_refused(stack: Any, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(stack, change)


@pytest.mark.long
def test_a_job_goes_on_once_its_simulator_begins_episodes_again(stack: Any, tmp_path: Path) -> None:
    """Resets raise in mid-run, fewer times than end the job, and the next one waits until the test has looked."""
    job = submit(stack, *arm(tmp_path, failures=FEW_FAILURES), "train.max_updates=8")
    stack.until(lambda: stack.status(job).warnings, "a warning", details=lambda: stack.client.why(job))
    status = stack.status(job)
    assert (status.phase, [one.kind for one in status.warnings]) == ("running", ["scorer_failures"])
    assert BROKEN in status.warnings[0].message
    shown = " ".join(stack.cli("why", job).output.split())
    assert f"episodes were lost and are not trained on; the newest error: {BROKEN}" in shown
    (tmp_path / "healed").touch()
    status = stack.finish(job).status
    assert (status.phase, status.step) == ("succeeded", 8), status
    assert status.draws["dropped"]["failed"] == FEW_FAILURES
    stack.check_audit(job)
    told = [row["message"] for row in stack.client.events(job, follow=False) if row["type"] == "health"]
    assert any(BROKEN in message for message in told), told


@pytest.mark.long
def test_a_job_whose_simulator_begins_no_more_episodes_fails(stack: Any, tmp_path: Path) -> None:
    job = submit(stack, *arm(tmp_path, failures=1_000_000), "train.max_updates=1000")
    status = stack.finish(job).status
    assert (status.phase, status.error.code, status.step > 0) == ("failed", "not_scored", True), status
    assert f"16 groups in a row were lost: {BROKEN}" in status.message
    stack.check_audit(job)


def arm(folder: Path, *, failures: int) -> list[str]:
    """Return changes that give the job one environment of ``e2e_simulators``, whose resets raise after some updates."""
    options = f"{{folder: {folder}, good: 14, failures: {failures}}}"
    simulator = "horizon: 20, num_envs: 1, sessions: 1, bytes_per_step: 256, step_limit_s: 150"
    return [
        f"environment={{task: 'e2e_simulators:Arm-v0', options: {options}, {simulator}}}",
        "train.batch_size=4", "train.draw_timeout_s=200", "evaluation.episodes=0",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm", ["{type: grpo, group_size: 8, epochs: 2, minibatches: 2}", "{type: ppo, epochs: 2}"]
)
def test_a_policy_is_trained_on_images_of_a_camera(stack: Any, algorithm: str) -> None:
    """Groups hold episodes with images; a group of eight takes more than one message."""
    job = submit(
        stack, "environment.image={height: 48, width: 72, grey: true, frames: 2}", "environment.bytes_per_step=7168",
        "environment.horizon=30", "policy.observations=[image]", "policy.encoder={channels: [4, 4], features: 8}",
        f"algorithm={algorithm}", "train.max_updates=4", "limits.byte_budget=33554432", "train.draw_timeout_s=60",
    )  # fmt: skip
    status = stack.finish(job, 150).status
    assert (status.phase, status.step) == ("succeeded", 4), status
    stack.check_audit(job)
    stack.check_replay(job, at_least=4)
    described = next(event for event in stack.ledger(job) if isinstance(event, JobStarted)).environment
    assert described["observations"]["image"] == [[48, 72, 2], "uint8"]
    series = stack.client.metrics(job)["series"]
    first = next(value for value in series["mismatch/kl"] if value is not None)
    assert abs(first) < 1e-6, "trainer and rollout worker compute the same log-probs"


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "options", "success"),
    [("gym-pendulum-world-model-ppo", (), None), ("metaworld-reach-world-model-ppo", ("--hold", "16"), 0.0)],
)
def test_a_policy_of_a_world_model_is_measured_in_the_simulator(
    stack: Any, tmp_path: Path, example: str, options: tuple[str, ...], success: float | None
) -> None:
    """Recorded episodes have six steps, which is also the longest that the model plays; held-out ones have nine.

    Neither model reports success. Meta-World does, Pendulum does not.
    """
    job = with_overrides(
        load_yaml(EXAMPLES / f"{example}.yaml"),
        ["environment.horizon=6", "environment.num_envs=2", f"environment.options.model={tmp_path}/model",
         "train={batch_size: 4, max_updates: 2, max_lag: 0, draw_timeout_s: 60}", "algorithm.minibatches=2",
         "evaluation.episodes=3", "evaluation.every=2", "evaluation.environment.horizon=9",
         "limits.byte_budget=4194304"],
    )  # fmt: skip
    file, shown = tmp_path / "job.yaml", tmp_path / "seen.demonstrations"
    file.write_text(yaml.safe_dump(job))
    for words in (
        ("record", str(file), "--random", *options, "--episodes", "4", "--to", str(shown)),
        ("sims", "world-model", "train", str(shown), "--out", f"{tmp_path}/model", "--epochs", "2", "--hidden", "8"),
    ):
        done = stack.cli(*words)
        assert done.exit_code == 0, done.output
    submitted = stack.client.submit(job).id
    status = stack.finish(submitted, 120).status
    assert (status.phase, status.step) == ("succeeded", 2), status
    described = next(event for event in stack.ledger(submitted) if isinstance(event, JobStarted)).environment
    assert described["backend"] == "world_model"
    series = stack.client.metrics(submitted)["series"]
    assert {value for value in series["episode/length"] if value is not None} == {6}
    assert [value for value in series["eval/length"] if value is not None] == [9, 9], "no model plays nine steps"
    assert "success/rate" not in series
    found = [value for value in series.get("eval/success", []) if value is not None]
    assert found == ([] if success is None else [success] * 2), "after nine steps no arm is there"
    listed = stack.cli("samples", submitted)
    assert "held-out episodes at update 2" in listed.output, listed.output
    assert stack.check_audit(submitted)["equation"]["trained"] == 8


@pytest.mark.long
@pytest.mark.timeout(600)
def test_any_process_may_die_in_mid_episode(stack: Any) -> None:
    job = submit(stack, *ENDLESS)
    for victim in VICTIMS:
        stack.reach(job, stack.status(job).step + FURTHER)
        if victim == "trainer-0":
            stack.until(lambda: stack.updates_to_repeat(job) >= 2, "updates to train again")
        if victim == "simulators":
            kill_simulators(stack, job)
        else:
            stack.kill(victim)
    check_end(stack, job)


@pytest.mark.long
@pytest.mark.timeout(360)
@pytest.mark.parametrize("victim", VICTIMS)
def test_any_process_may_hang_in_mid_episode(stack: Any, victim: str) -> None:
    """The victim stops until another process gives up on it, and then continues, if it still lives."""
    job = submit(
        stack, "train.max_updates=16", "train.max_lag=0", "checkpoint.every=5", "environment.horizon=200",
        "environment.step_limit_s=4", "train.draw_timeout_s=8",
    )  # fmt: skip
    stack.reach(job, 7)
    hang(stack, job, victim)
    record = stack.finish(job, 200)
    assert (record.status.phase, record.status.step) == ("succeeded", 16), record.status
    stack.check_audit(job)
    events = stack.ledger(job)
    assert [event.number for event in events if isinstance(event, BatchTrained)] == list(range(1, 17))
    assert not any(isinstance(event, LineageForked) for event in events), "a trainer that went on gave other digests"
    stack.check_replay(job, at_least=5)


def check_end(stack: Any, job: str) -> None:
    """Check that a job ends after a few more updates, that each counts once, and that restarted processes took over."""
    stack.reach(job, stack.status(job).step + FURTHER)
    total = int(stack.status(job).step) + LAST
    stack.client.amend(job, {"train": {"max_updates": total}})
    stack.check_updates(job, total, trainers=2)
    stack.check_replay(job, at_least=5)


def kill_simulators(stack: Any, job: str) -> None:
    """Kill all simulators until episodes are lost; a simulator that plays no episode is only restarted."""
    failed = stack.status(job).draws["dropped"].get("failed", 0)

    def lost() -> bool:
        for child in simulators(stack):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        return bool(stack.status(job).draws["dropped"].get("failed", 0) > failed)

    stack.until(lost, "episodes that are lost with their simulators")


def hang(stack: Any, job: str, victim: str) -> None:
    """Stop a process until another process that waits for it has noticed."""
    if victim == "simulators":  # the env service kills them after environment.step_limit_s
        children = simulators(stack)
        assert children
        for child in children:
            child.suspend()
        stack.until(lambda: not any(child.is_running() for child in children), "the end of hung simulators")
        return
    if victim in ("coordinator-0", "nats"):
        hang_coordinator_or_broker(stack, victim)
        return
    gone = f"of job {job} is gone"
    dropped, count = sum(stack.status(job).draws["dropped"].values()), stack.log("rollout-0").count(gone)
    with stack.frozen(victim):
        if victim == "env-0":
            stack.until(
                lambda: stack.log("rollout-0").count(gone) > count, "the worker to give its session up", RESET_LIMIT_S
            )
        elif victim == "rollout-0":
            stack.until(
                lambda: sum(stack.status(job).draws["dropped"].values()) > dropped, "the leader to give its draws up"
            )
        else:
            time.sleep(STALL_S)


def hang_coordinator_or_broker(stack: Any, victim: str) -> None:
    """Stop the coordinator or the broker until the lease has expired and, for the broker, all services have noticed."""
    epoch = lease(stack).epoch
    counts = {name: stack.log(name).count(CUT) for name in SERVICES}
    with stack.frozen(victim):
        time.sleep(STALL_S)
        if victim == "nats":
            stack.until(
                lambda: all(stack.log(name).count(CUT) > count for name, count in counts.items()),
                "every service to give up the broker",
            )
    stack.until(lambda: lease(stack).epoch > epoch, "the coordinator with a new lease")


def lease(stack: Any) -> LeaseRecord:
    """Return the record of the coordinators' lease."""
    entry = stack.on_bus(lambda bus: bus.kv(subjects.LEASES).get(COORDINATOR))
    return msgspec.json.decode(entry.value, type=LeaseRecord)


def simulators(stack: Any) -> list[psutil.Process]:
    """Return the simulator processes of the env service."""
    found = []
    for child in psutil.Process(stack.pid("env-0")).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] if any(word.endswith("simulators/child.py") for word in child.cmdline()) else []
    return found


SAC_CHANGES = (
    "environment={task: Pendulum-v1, horizon: 50, num_envs: 4, sessions: 1, bytes_per_step: 256}",
    "policy={type: squashed, hidden_sizes: [32]}", "train.max_updates=24", "checkpoint.every=6",
    "limits.byte_budget=16777216",
    "algorithm={type: sac, warmup_transitions: 1000, steps_per_update: 20, batch_size: 64,"
    " critic_hidden_sizes: [32], buffer: {capacity: 5000}}",
)  # fmt: skip


@pytest.mark.long
def test_soft_actor_critic_goes_on_to_the_same_bytes_after_a_kill(stack: Any, tmp_path: Path) -> None:
    """A new trainer loads the replay buffer of its checkpoint and repeats later updates with the same digests.

    A learner without a break trains the batches of the ledger here; the files of its checkpoint, among them the buffer,
    are those of the last checkpoint of the job. By then the buffer is full, and has overwritten its first rows.
    """
    job = submit(stack, *SAC_CHANGES)
    for step in (7, 13):
        stack.reach(job, step)
        kill_between_checkpoints(stack, job, every=6)
    record = stack.finish(job, 150)
    assert (record.status.phase, record.status.step) == ("succeeded", 24), record.status
    stack.check_audit(job)
    events = stack.ledger(job)
    assert not any(isinstance(event, LineageForked) for event in events)
    assert len({event.trainer_epoch for event in events if isinstance(event, BatchTrained)}) >= 3
    stack.check_replay(job, at_least=6)
    last = [event for event in events if isinstance(event, Checkpointed)][-1]
    assert last.number == 24
    paths = stack.data_dir / last.path, unbroken(stack, job, tmp_path)
    found, expected = (read_manifest(path).manifest.files for path in paths)
    assert any(name.startswith("replay/") for name in expected)
    del found["rng.safetensors"], expected["rng.safetensors"]  # torch's generator, which no update reads
    assert found == expected


def kill_between_checkpoints(stack: Any, job: str, *, every: int) -> None:
    """Kill the trainer at a moment when its newest update is in no checkpoint, so that the next one must repeat it."""

    def killed() -> bool:
        with stack.frozen("trainer-0"):
            if stack.updates_to_repeat(job) % every == 0:  # the checkpoint of that update may be under way
                return False
            stack.kill("trainer-0")
        return True

    stack.until(killed, "an update that is in no checkpoint")


def unbroken(stack: Any, job: str, folder: Path) -> Path:
    """Train the batches of a job's ledger from its first version on, in this process; return the checkpoint."""
    config = EmbodiedJob.parse(with_overrides(copy.deepcopy(JOB), list(SAC_CHANGES)))
    events, groups = stack.ledger(job), stack.groups(job)
    spec = next(event for event in events if isinstance(event, JobStarted)).environment
    sealed = {event.number: event for event in events if isinstance(event, BatchSealed)}
    learner = EmbodiedLearner(config, msgspec.convert(spec, EnvSpec))
    for batch in sealed.values():
        shard = BatchShard.whole([groups[one.seq] for one in batch.groups])
        learner.update(shard, update_index=batch.update_index)
    return save_checkpoint(folder, job, max(sealed), learner.state(), {})


@pytest.mark.long
def test_an_extended_job_goes_on_with_its_replay_buffer(stack: Any) -> None:
    """One replay from the first checkpoint on, with one buffer, gives the digests before and after the extension."""
    job = submit(
        stack, "environment={task: Pendulum-v1, horizon: 20, num_envs: 4, sessions: 1, bytes_per_step: 256}",
        "policy={type: squashed, hidden_sizes: [16]}", "train.max_updates=6", "checkpoint.every=100",
        "algorithm={type: sac, warmup_transitions: 300, steps_per_update: 5, batch_size: 32,"
        " critic_hidden_sizes: [16], buffer: {capacity: 5000}}",
    )  # fmt: skip
    assert stack.finish(job).status.phase == "succeeded"
    extended = stack.cli("extend", job, "--max-updates", "10", "--follow", "--json")
    assert extended.exit_code == 0, extended.output
    record = stack.client.get(job)
    assert (record.status.phase, record.status.step, record.extensions) == ("succeeded", 10, 1), record.status
    events = stack.ledger(job)
    ends = [type(event) for event in events if isinstance(event, Finished | Extended)]
    assert ends == [Finished, Extended, Finished]
    names = ("buffer/inserted", "buffer/size", "critic/steps")
    series = stack.client.metrics(job, names=",".join(names))["series"]
    inserted, sizes, steps = ([value for value in series[name] if value is not None] for name in names)
    assert inserted == sizes == [160 * update for update in range(1, 11)], "eight episodes of 20 steps in each update"
    assert steps == [0] + [5] * 9, "the warm-up is not repeated"
    stack.check_audit(job)
    stack.check_replay(job, at_least=10)


@pytest.mark.long
def test_a_job_begins_with_a_policy_from_demonstrations(stack: Any, tmp_path: Path) -> None:
    """Version 0 balances the pole as long as the expert did; the ledger holds it like any other version."""

    def balance(_: EnvSpec) -> Any:
        return lambda seen: (seen["state"][:, 2] + 0.3 * seen["state"][:, 3] > 0).astype(np.int64)[:, None]

    path = tmp_path / "balance.demonstrations"
    with pytest.raises(ConfigError, match=r"balance\.demonstrations cannot be read"):
        submit(stack, f"warm_start.demonstrations={path}")
    shown = record(OpenEnv(env_id="CartPole-v1", num_envs=1), stack.data_dir, balance, reset_ids=range(16), horizon=100)
    write_demonstrations(path, shown)
    job = submit(
        stack, f"warm_start={{demonstrations: {path}, epochs: 30, learning_rate: 1e-2}}", "train.max_updates=2"
    )
    status = stack.finish(job).status
    assert (status.phase, status.step) == ("succeeded", 2), status
    path.unlink()  # the first checkpoint holds the learnt weights
    series = stack.client.metrics(job)["series"]
    first = next(value for value in series["eval/length"] if value is not None)
    assert first >= 90, "a random policy falls after some twenty steps"
    stack.check_audit(job)
    stack.check_replay(job, at_least=2)
