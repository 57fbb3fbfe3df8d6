"""Environment variables that the processes of a service get."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

import penstock
from penstock.local.launch import interpreter_of, service_environment

SHELL = {
    "PATH": "/bin", "HOME": "/home/u", "OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": "s", "OPENAI_API_KEY": "s",
    "PENSTOCK_API_KEY": "s", "PENSTOCK_API_KEYS": "s", "PENSTOCK_LOG_LEVEL": "info", "HF_TOKEN": "h", "MY_TOKEN": "m",
    "PENSTOCK_SCORER_ENV": "OPENAI_API_KEY", "WANDB_API_KEY": "w", "SSH_AUTH_SOCK": "s",
}  # fmt: skip


@pytest.mark.parametrize("service", ["rollout", "env", "reward", "trainer"])
def test_a_worker_sees_no_key_of_the_api_nor_the_rest_of_the_shell(service: str) -> None:
    own = {"PENSTOCK_NATS_URL": "nats://x", "PENSTOCK_API_KEYS": "s", "RANK": "1"}
    found = service_environment(service, SHELL, own)
    assert found.keys() >= {"PATH", "HOME", "OMP_NUM_THREADS", "PENSTOCK_LOG_LEVEL", "PENSTOCK_NATS_URL", "RANK"}
    assert not found.keys() & {
        "PENSTOCK_API_KEY",
        "PENSTOCK_API_KEYS",
        "AWS_SECRET_ACCESS_KEY",
        "SSH_AUTH_SOCK",
        "MY_TOKEN",
    }
    assert ("OPENAI_API_KEY" in found) == (service == "reward"), "scorer_env names it for scorers"
    assert ("HF_TOKEN" in found) == (service != "env")


def test_the_coordinator_has_the_keys_and_those_of_trackers() -> None:
    found = service_environment("coordinator", SHELL, {})
    assert found.keys() >= {"PENSTOCK_API_KEYS", "WANDB_API_KEY"}
    assert not found.keys() & {"PENSTOCK_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"}


def test_services_see_what_their_libraries_need() -> None:
    shell = {**SHELL, "SWANLAB_API_KEY": "w", "HF_HOME": "/models", "HUGGING_FACE_HUB_TOKEN": "h", "MUJOCO_GL": "egl"}
    assert service_environment("coordinator", shell, {}).keys() >= {"SWANLAB_API_KEY", "HF_HOME"}
    env = service_environment("env", shell, {})
    assert env.keys() >= {"HF_HOME", "MUJOCO_GL"}, "data sets of environments; what simulators draw with"
    assert not env.keys() & {"SWANLAB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    assert "HUGGING_FACE_HUB_TOKEN" in service_environment("rollout", shell, {})


def test_a_deployment_names_what_else_its_workers_see() -> None:
    named = {**SHELL, "PENSTOCK_WORKER_ENV": "MY_TOKEN, AWS_SECRET_ACCESS_KEY"}
    assert service_environment("env", named, {})["MY_TOKEN"] == "m"
    assert "MY_TOKEN" not in service_environment("env", SHELL, {})


def test_a_service_with_another_interpreter_imports_the_code_that_runs_here(tmp_path: Path) -> None:
    """The virtual environment of the interpreter need not contain Penstock: here it is empty."""
    venv.create(tmp_path / "other", with_pip=False)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "probe.py").write_text(
        "import penstock, sys\nprint(sys.prefix, penstock.__file__, sys.argv[0].endswith('probe.py'))\n"
    )
    environment = {"PYTHONPATH": str(tmp_path / "modules"), "PATH": "/usr/bin"}
    for _ in range(2):  # a second start finds the link of the first
        launch = interpreter_of(tmp_path / "other" / "bin" / "python", tmp_path / "code")
        with (tmp_path / "log").open("wb") as log:
            assert launch("probe", environment, log).wait(60) == 0, (tmp_path / "log").read_text()
        prefix, file, _ = (tmp_path / "log").read_text().split()
        assert Path(prefix).resolve() == (tmp_path / "other").resolve()
        assert Path(file).resolve() == Path(penstock.__file__).resolve()
