"""A job with an environment of the library `verifiers`, through all services: played, scored, trained, audited."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from penstock.shared.errors import ConfigError

pytestmark = [pytest.mark.clients, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)
TOTAL = 6
JOB: dict[str, Any] = {
    "name": "tasks",
    "data": {"train": {"type": "tasks", "num_rows": 2}, "prompt": {"max_tokens": 16}},
    "reward": {"scorers": [{"type": "environment"}]},
    "algorithm": {"type": "reinforce_pp", "group_size": 2},
    "environment": {
        "type": "verifiers", "env": {"taskset": {"id": "chain-single"}}, "max_observation_tokens": 8,
        "step_timeout_s": 100, "turn_timeout_s": 100,
    },
    "sampling": {"max_new_tokens": 12},
    "optimizer": {"learning_rate": 1e-7},
    "train": {"batch_size": 8, "max_updates": TOTAL},
    "checkpoint": {"every": 2},
    "limits": {"byte_budget": 8 << 20},
}  # fmt: skip


def test_tasks_are_played_and_trained(stack: Any, python_of: Any, chain: ModuleType, tmp_path: Path) -> None:
    python = python_of("verifiers")
    chain.save_chain(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    model = {"path": str(tmp_path), "tokenizer": str(tmp_path / "tokenizer")}
    spec = {**JOB, "model": model, "environment": {**JOB["environment"], "python": str(python)}}
    job = stack.client.submit(spec).id
    stack.reach(job, 1, 150)
    below = psutil.Process(stack.pid("env-0")).children(recursive=True)
    (player,) = (child for child in below if "child.py" in " ".join(child.cmdline()))
    player.kill()  # during episodes, which start again
    record = stack.finish(job, 150)
    assert (record.status.phase, record.status.step) == ("succeeded", TOTAL), record.status.message
    groups = stack.groups(job).values()
    assert not any(group.failed.any() for group in groups)
    assert {tuple(np.unique(group.rewards).tolist()) for group in groups} == {(0.0,), (1.0,)}, (
        "of right and wrong tasks"
    )
    stack.check_audit(job)
    stack.check_replay(job, at_least=2)


def test_a_taskset_beside_the_job_file_is_tried_uploaded_and_trained_with(
    stack: Any, python_of: Any, chain: ModuleType, tmp_path: Path
) -> None:
    python = python_of("verifiers")
    chain.save_chain(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    taskset = tmp_path / "word_game.py"
    shutil.copy(Path(__file__).parents[1] / "clients/environments/chain_single.py", taskset)
    environment = {**JOB["environment"], "path": "./word_game.py", "env": {}, "python": str(python)}
    model = {"path": str(tmp_path), "tokenizer": str(tmp_path / "tokenizer")}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, "model": model, "environment": environment}))
    right = taskset.read_text()
    taskset.write_text(right.replace("import verifiers.v1", "import nowhere, verifiers.v1"))
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        stack.client.dry_run(file)
    taskset.write_text(right)
    stack.client.dry_run(file)
    job = stack.client.submit(file).id
    taskset.unlink()
    assert stack.finish(job, 200).status.phase == "succeeded"
    assert {tuple(np.unique(group.rewards).tolist()) for group in stack.groups(job).values()} == {(0.0,), (1.0,)}
    stack.check_replay(job, at_least=2)
