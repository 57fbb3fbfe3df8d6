"""OpenAI's fine-tuning API on a running stack: by plain HTTP, and with the stock SDK in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

KEY = "e2e-key"
SCRIPT = Path(__file__).with_name("openai_fine_tuning.py")
# About half of what random weights write fits, so that every batch has something to learn.
GRADER = {
    "type": "multi", "name": "half", "calculate_output": "max(low, plus) * 1.0",
    "graders": {
        "low": {"type": "python", "name": "low",
                "source": "def grade(sample, item):\n    return sample['output_text'][:1] in item['good']"
                          " and 1 or 0"},
        "plus": {"type": "string_check", "name": "plus", "operation": "like", "input": "{{sample.output_text}}",
                 "reference": "{{item.mark}}"},
    },
}  # fmt: skip
ROWS = [{"question": f"{i % 10}+{i // 10}=", "good": "01234", "mark": "+"} for i in range(16)]


@pytest.mark.long
def test_a_job_trains_with_a_grader_on_an_uploaded_file(stack: Any) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=stack.stack.url, headers=headers, timeout=60) as http:
        data = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
        sent = http.post("/v1/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "fine-tune"})
        file = sent.json()["id"]
        run = http.post("/v1/graders/run", json={"grader": GRADER, "model_sample": "3", "item": ROWS[0]}).json()
        assert (run["reward"], run["sub_rewards"]) == (1.0, {"low": 1.0, "plus": 0.0})
        method = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 4}}}
        body = {"model": "tiny", "training_file": file, "method": method, "seed": 3}
        job = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        record = stack.finish(job)
        assert (record.status.phase, record.status.step) == ("succeeded", 4), record.status.message
        assert 0 < record.status.reward < 1
        stack.check_audit(job)
        shown = http.get(f"/v1/fine_tuning/jobs/{job}").json()
        assert (shown["status"], shown["fine_tuned_model"]) == ("succeeded", f"job:{job}@final")
        asked = {"model": shown["fine_tuned_model"], "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
        answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        (deployed,) = [one for one in stack.client.list(kind="serving") if one.origin and one.origin.job == job]
        assert (deployed.origin.number, answer.json()["model"]) == (4, f"{deployed.name}@0")
        assert answer.json()["usage"]["completion_tokens"] >= 1  # a sampled text may be empty: it may end at once
        stack.client.cancel(deployed.id)
        stack.finish(deployed.id)
        newest = http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints").json()["data"][0]
        assert newest["step_number"] == 4
        again = http.post("/v1/fine_tuning/jobs", json={**body, "model": newest["fine_tuned_model_checkpoint"]})
        assert again.status_code == 200, again.text
        assert stack.finish(again.json()["id"]).status.phase == "succeeded"
        assert http.delete(f"/v1/files/{file}").status_code == 200


@pytest.mark.clients
def test_the_stock_sdk_fine_tunes_a_model(stack: Any, python_of: Any, tmp_path: Path) -> None:
    python = python_of("openai")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "grader.json").write_text(json.dumps(GRADER))
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    command = [str(python), str(SCRIPT), stack.stack.url, KEY, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
