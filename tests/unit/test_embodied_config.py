"""Job files of kind `embodied`: settings that are refused, and values that are derived."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.coordinator.jobs.environments import (
    bytes_per_step,
    check_camera,
    check_followed,
    check_held_out,
    check_spec,
)
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import parse_job, parse_training, text_job, trains
from penstock.shared.config.jobs.training_job import TrainingJob
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec, Picture

JOB: dict[str, Any] = {
    "kind": "embodied",
    "name": "reach",
    "environment": {"backend": "metaworld", "task": "reach-v3", "horizon": 100, "num_envs": 8},
    "algorithm": {"type": "ppo"},
    "train": {"batch_size": 16, "max_updates": 3},
}


def job(**sections: dict[str, Any]) -> EmbodiedJob:
    """Return the job above with some keys changed."""
    data = {**JOB, **{name: {**JOB.get(name, {}), **section} for name, section in sections.items()}}
    config = parse_job(data)
    assert isinstance(config, EmbodiedJob)
    return config


def spec(**changes: Any) -> EnvSpec:
    """Return the description of the simulator of that job, with some fields changed."""
    known: dict[str, Any] = {
        "env_id": "reach-v3", "backend": "metaworld", "num_envs": 1,
        "observations": {"state": ArraySpec((39,), "float64")}, "action_shape": (4,), "action_dtype": "float32",
        "num_actions": None, "action_low": [-1.0] * 4, "action_high": [1.0] * 4, "max_episode_steps": 100,
        "has_success": True, "versions": {},
    }  # fmt: skip
    return EnvSpec(**known | changes)


def test_a_job_derives_its_groups_draws_and_bytes() -> None:
    config = job(algorithm={"type": "grpo", "group_size": 4}, environment={"action_chunk": 3})
    assert (config.groups_per_batch, config.completions_per_group, config.max_draws) == (4, 4, 4)
    assert config.max_decisions == 34
    assert config.max_group_bytes == 4096 + 4 * (512 + 35 * 2048)
    assert config.services == ("trainer", "rollout", "env")
    assert config.data_epochs is None
    assert config.algorithm.smallest_group == 2
    assert trains(JOB)
    assert isinstance(parse_training(JOB), EmbodiedJob)


@pytest.mark.parametrize("name", ["id", "env_id", "disable_env_checker"])
def test_options_cannot_name_the_environment(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"options.*'{name}' is no option: `task` names the environment"):
        job(environment={"options": {name: "other-v0"}})


def test_the_base_class_of_training_jobs_cannot_be_created() -> None:
    with pytest.raises(TypeError, match=r"max_group_bytes.*services"):
        TrainingJob(**job().model_dump())


def test_videos_are_refused_where_the_simulator_cannot_render() -> None:
    dark = spec(no_video="no OpenGL library: apt-get install -y libosmesa6")
    assert check_camera(job(evaluation={"videos": 2}), spec()) == []
    with pytest.raises(ConfigError, match=r"^evaluation\.videos: .*apt-get install -y libosmesa6; or take 0 or auto$"):
        check_camera(job(evaluation={"videos": 2}), dark)
    (warning,) = check_camera(job(evaluation={"videos": "auto"}), dark)
    assert "apt-get install" in warning
    with pytest.raises(ConfigError, match="only 2 episodes are held out"):
        job(evaluation={"episodes": 2, "videos": 3})
    counts = [
        job(evaluation={"episodes": n, "videos": v}).evaluation.num_videos
        for n, v in ((9, "auto"), (1, "auto"), (9, 3))
    ]
    assert counts == [1, 1, 3]


def test_goals_that_follow_a_success_which_nobody_reports_are_warned_of() -> None:
    stop, keep = {"metric": "success/rate", "goal": 0.9}, {"keep_best": {"metric": "eval/success"}}
    config = job(early_stop=stop, checkpoint=keep)
    assert check_followed(config, spec(held_out_success=True)) == []
    for changes, key in (
        ({"has_success": False, "held_out_success": True}, "early_stop.metric: 'success/rate' is missing"),
        ({"has_success": True, "held_out_success": False}, "checkpoint.keep_best.metric: 'eval/success' is missing"),
    ):
        (warning,) = check_followed(config, spec(**changes))
        assert warning.startswith(key)
    silent = spec(has_success=False)
    assert check_followed(job(checkpoint={"keep_best": {"metric": "eval/return"}}), silent) == []


def test_reset_ids_repeat_only_if_their_number_is_limited() -> None:
    assert [job().environment.reset_id(n) for n in (0, 7, 1000)] == [0, 7, 1000]
    few = job(environment={"first_reset_id": 10, "num_reset_ids": 5}).environment
    assert [few.reset_id(n) for n in (0, 4, 5, 12)] == [10, 14, 10, 12]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"batch_size": 15}, "algorithm": {"type": "grpo"}}, "not divisible by algorithm.group_size 8"),
        ({"algorithm": {"type": "sac"}}, "algorithm 'sac' trains a 'squashed' policy"),
        ({"policy": {"type": "squashed"}}, "'squashed' is for algorithm 'sac', found 'ppo'"),
        (
            {"algorithm": {"type": "sac", "warmup_transitions": 4801}, "policy": {"type": "squashed"}},
            "the run has at most 4800 transitions, so nothing would be trained",
        ),
        ({"evaluation": {"first_reset_id": 0}}, "training draws every id from 0 on"),
        ({"environment": {"num_reset_ids": 50}, "evaluation": {"first_reset_id": 49}}, "they overlap"),
        ({"early_stop": {"metric": "eval/greedy", "goal": 1}}, "they measure eval/return, eval/success, eval/length"),
        ({"environment": {"bytes_per_step": 1 << 24}}, "more than a group may have"),
        ({"limits": {"byte_budget": 1 << 20}}, "raise it to at least"),
        ({"environment": {"image": {}}}, "the policy reads no 'image'; name it in policy.observations"),
        (
            {
                "environment": {"image": {}},
                "policy": {"type": "squashed", "observations": ["image"]},
                "algorithm": {"type": "sac", "warmup_transitions": 1},
            },
            "the replay buffer of 'sac' holds vectors",
        ),
        (
            {"evaluation": {"episodes": 0, "environment": {"task": "reach-v3", "horizon": 9}}},
            "no episode is held out; raise episodes, or leave it out",
        ),
        (
            {"evaluation": {"environment": {"task": "reach-v3", "horizon": 9, "sessions": 2}}},
            "evaluation.environment.sessions",
        ),
        ({"policy": {"encoder": {"kernel_size": 4}}}, "kernel_size.*must be odd"),
        ({"environment": {"horizont": 3}}, "did you mean 'horizon'"),
        ({"algorithm": {"type": "dapo"}}, "'ppo', 'grpo', 'sac'"),
        ({"train": {"max_updates": None}}, "train.max_updates"),
    ],
)
def test_contradicting_settings_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**sections)


def test_an_embodied_job_is_refused_as_a_language_model_job() -> None:
    with pytest.raises(ConfigError, match="kind 'embodied' trains no language model"):
        text_job(JOB)


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        ({"observations": ["image"]}, {}, "has no observation 'image'; it has: state; environment.image adds it"),
        ({"type": "categorical"}, {}, "an action of metaworld 'reach-v3' is 4 numbers; use gaussian, tokens"),
        ({}, {"num_actions": 3, "action_shape": ()}, "is one of 3 actions; use categorical"),
        ({"type": "tokens"}, {"action_high": [float("inf")] * 4}, "no finite bounds; use gaussian"),
        ({}, {"observations": {"state": ArraySpec((400,), "float64")}}, "takes 3350 bytes; raise it"),
    ],
)
def test_a_policy_that_does_not_fit_its_simulator_is_refused(
    policy: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_spec(job(policy=policy), spec(**changes))


def test_held_out_episodes_are_played_where_the_policy_fits() -> None:
    """Actions, and observations that the policy reads, must be equal in name, shape and bounds; others may differ.

    Reset ids may overlap with those of training, because another simulator reads them.
    """
    real = {"backend": "metaworld", "task": "reach-v3", "horizon": 100}
    config = job(evaluation={"first_reset_id": 0, "environment": real})
    assert config.held_out_simulator.opening(1).backend == "metaworld"
    assert job().held_out_simulator == job().environment
    more = {"state": ArraySpec((39,), "float64"), "expert_action": ArraySpec((4,), "float32")}
    check_held_out(config, spec(), spec(observations=more))
    for changes, message in (
        ({"observations": {"pose": ArraySpec((39,), "float64")}}, "observation 'state' of metaworld .*: missing; the"),
        ({"observations": {"state": ArraySpec((38,), "float64")}}, r"shape=\(38,\).* is trained in .*shape=\(39,\)"),
        ({"action_high": [2.0] * 4}, "^evaluation.environment: actions of metaworld 'reach-v3'"),
        ({"num_actions": 3, "action_shape": ()}, "actions of metaworld 'reach-v3'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_held_out(config, spec(), spec(**changes))


def test_images_are_requested_and_counted() -> None:
    """The request for simulators names the image, and the bytes of a decision include it."""
    image = {"height": 24, "width": 32, "grey": True, "frames": 3}
    pictured = {"state": ArraySpec((39,), "float64"), "image": ArraySpec((24, 32, 3), "uint8")}
    need = bytes_per_step(job(), spec()) + 24 * 32 * 3

    def config(bytes_per_step: int, **sections: dict[str, Any]) -> EmbodiedJob:
        return job(
            **{
                "environment": {"image": image, "bytes_per_step": bytes_per_step},
                "policy": {"observations": ["image"]},
                **sections,
            }
        )

    check_spec(config(need), spec(observations=pictured))
    assert config(need).environment.opening(2).picture == Picture(**image)
    assert job().environment.opening(2).picture is None
    with pytest.raises(ConfigError, match=f"takes {need} bytes; raise it"):
        check_spec(config(need - 1), spec(observations=pictured))
    own = job(
        environment={"bytes_per_step": need},
        policy={"type": "squashed", "observations": ["image"]},
        algorithm={"type": "sac", "warmup_transitions": 1},
    )
    with pytest.raises(ConfigError, match="'image' of metaworld 'reach-v3' is an image, which 'sac' cannot learn from"):
        check_spec(own, spec(observations=pictured))


def test_a_replay_buffer_that_does_not_fit_its_bytes_is_refused() -> None:
    """A row holds two observations, a chunk of actions and a reward, whose sizes only the simulator gives."""
    row_bytes = 4 * (2 * 39 + 3 * 4 + 1) + 1

    def check(capacity: int) -> None:
        buffer = {"capacity": capacity, "max_bytes": 1000 * row_bytes + 5}
        algorithm = {"type": "sac", "warmup_transitions": 10, "buffer": buffer}
        check_spec(job(policy={"type": "squashed"}, environment={"action_chunk": 3}, algorithm=algorithm), spec())

    check(1000)
    with pytest.raises(ConfigError, match=rf"buffer\.capacity 1001 needs {1001 * row_bytes} bytes .* at most 1000 fit"):
        check(1001)


def test_a_policy_that_fits_is_accepted() -> None:
    check_spec(job(), spec())
    check_spec(job(policy={"type": "categorical"}), spec(num_actions=2, action_shape=(), action_low=[], action_high=[]))
    assert bytes_per_step(job(environment={"action_chunk": 5}), spec()) == 39 * 8 + 5 * (4 * 12 + 6) + 96
