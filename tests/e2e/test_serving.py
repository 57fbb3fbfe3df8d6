"""Use of a trained model: other job files name it, it is deployed, and clients ask it by OpenAI's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.local.ports import free_ports
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

pytestmark = [
    pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks for it
]  # fmt: skip

KEY = "e2e-key"
LORA = {"rank": 2, "alpha": 4}


@pytest.fixture(scope="module")
def trained(stack: Any) -> str:
    """Id of a finished job with checkpoints 0 and 4, and usually one between: no two are written at the same time."""
    job: str = stack.submit("name=served-from", "train.max_updates=4", "checkpoint.every=2", "checkpoint.keep=3")
    assert stack.finish(job).status.phase == "succeeded"
    return job


@pytest.fixture(scope="module")
def earlier(stack: Any, trained: str) -> int:
    """Number of the last checkpoint but one of ``trained``."""
    return int(stack.client.checkpoints(trained)[-2]["number"])


@pytest.fixture(scope="module")
def adapted(stack: Any, trained: str) -> str:
    """Id of a finished job that trained an adapter on the final checkpoint of ``trained``."""
    base = stack.client.checkpoints(trained)[-1]["path"]
    job: str = stack.submit(
        "name=adapted", "train.max_updates=2", "optimizer.learning_rate=0.05", model={"path": base, "lora": LORA}
    )
    assert stack.finish(job).status.phase == "succeeded"
    return job


@pytest.fixture
def http(stack: Any) -> Any:
    with httpx.Client(base_url=stack.stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=90) as client:
        yield client


def chat(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, "temperature": 0}
    return http.post("/v1/chat/completions", json={**body, **more})


def say(http: httpx.Client, model: str) -> str:
    reply = chat(http, model)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def status_of(http: httpx.Client, model: str) -> int:
    try:
        return chat(http, model).status_code
    except httpx.TransportError:  # the coordinator is starting
        return 0


def deployments(stack: Any) -> list[JobRecord]:
    """Return the running deployments that requests have started."""
    found = stack.client.list(kind="serving", metadata={"deployed": "on request"})
    return [record for record in found if record.status.phase not in TERMINAL_PHASES]


def holders(stack: Any, job: str) -> list[tuple[str, str, int]]:
    """Return service and name of each worker that holds slots for a deployment, and the version that it serves."""
    rows = stack.client.workers(job)
    return [(row["service"], row["worker"], row["version"]) for row in rows if "requests" in row]


def end(stack: Any, job: str) -> None:
    """Cancel a deployment, unless it has ended, and wait for its end."""
    if stack.status(job).phase not in TERMINAL_PHASES:
        stack.client.cancel(job)
    stack.finish(job)


@pytest.mark.long
def test_a_job_begins_with_a_checkpoint_by_name(stack: Any, trained: str, earlier: int) -> None:
    model = {"path": f"job:served-from@step:{earlier}"}
    plan = stack.client.dry_run({**job_of(stack, trained), "model": model})
    assert (plan["origin"]["job"], plan["origin"]["number"]) == (trained, earlier)
    assert plan["spec"]["optimizer"]["warmup_updates"] == job_of(stack, trained)["train"]["max_updates"] // 2
    assert not plan["warnings"]
    record = stack.client.get(stack.submit("name=goes-on", "train.max_updates=1", model=model))
    assert record.origin is not None
    assert (record.origin.model, record.origin.job, record.origin.number) == (model["path"], trained, earlier)
    assert record.spec["model"]["path"] == record.origin.path
    assert stack.finish(record.id).status.phase == "succeeded"
    for wrong, nearest in {
        "job:served-from@5": r"no checkpoint 5; there are: 0, .*4; the nearest is 4",
        "job:served-from@best": "no best checkpoint.*checkpoint.keep_best.*latest one is 4",
        "job:served-from@finale": "did you mean 'final'",
        "job:served-form@final": "did you mean 'served-from'",
        "job:served-from": "write job:NAME@final",
    }.items():
        with pytest.raises(ConfigError, match=nearest):
            stack.client.dry_run({**job_of(stack, trained), "model": {"path": wrong}})


def job_of(stack: Any, job: str) -> dict[str, Any]:
    spec: dict[str, Any] = stack.client.get(job).spec
    return spec


def test_a_deployment_answers_until_it_is_cancelled(stack: Any, trained: str, earlier: int, http: httpx.Client) -> None:
    served = stack.cli("serve", "job:served-from@final", "--name", "adder")
    assert served.exit_code == 0, served.output
    record = next(r for r in stack.client.list(name="adder"))
    assert (record.kind, record.status.phase, record.origin.number) == ("serving", "running", 4)
    shown = next(row for row in http.get("/v1/models").json()["data"] if row["id"] == "adder")
    assert (shown["served"], shown["checkpoint"]) == (True, f"job:{trained}@4")
    stack.until(
        lambda: holders(stack, record.id) == [("rollout", "rollout-0", 0)], "the worker says what it holds", 60,
        lambda: stack.client.workers(record.id),
    )  # fmt: skip
    before = say(http, "adder")
    text = http.post("/v1/completions", json={"model": "adder", "prompt": "1+2=", "max_tokens": 4, "temperature": 0})
    assert text.json()["choices"][0]["text"] == before
    assert "adder" in stack.cli("ls", "--kind", "serving").output
    stack.kill("rollout-0", "coordinator-0")
    stack.until(lambda: status_of(http, "adder") == 200, "the deployment answers after its workers died", 90)
    assert say(http, "adder") == before
    with pytest.raises(ConfigError, match="'adder' is the model of job"):
        stack.client.submit({"kind": "serving", "name": "adder", "model": {"path": "job:served-from@0"}})
    end(stack, record.id)
    stack.until(lambda: status_of(http, "adder") == 404, "the deployment answers no more")
    stack.until(lambda: holders(stack, record.id) == [], "the worker has given the slots back")
    served = stack.cli("serve", f"served-from@step:{earlier}")
    assert served.exit_code == 0, served.output
    record = next(r for r in stack.client.list(name=f"served-from-{earlier}"))
    assert (record.kind, record.status.phase, record.origin.number) == ("serving", "running", earlier)
    end(stack, record.id)


@pytest.mark.long
@pytest.mark.usefixtures("adapted")
def test_a_checkpoint_is_deployed_by_asking_for_it(stack: Any, trained: str, http: httpx.Client) -> None:
    model = f"job:{trained}@final"
    listed = {row["id"]: row for row in http.get("/v1/models").json()["data"]}
    assert listed[model]["served"] is False
    with httpx.stream(
        "POST", f"{stack.stack.url}/v1/chat/completions", timeout=90, headers={"authorization": f"Bearer {KEY}"},
        json={"model": model, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, "stream": True},
    ) as reply:  # fmt: skip
        assert reply.status_code == 200, reply.read()
        assert "[DONE]" in "".join(reply.iter_text())
    text = say(http, model)
    assert say(http, "job:served-from@4") == text
    deployed = deployments(stack)
    assert [record.origin.checkpoint for record in deployed] == [f"job:{trained}@4"]
    assert http.get(f"/v1/models/{model}").json()["served"] is True
    assert say(http, deployed[0].name) == text
    missing = chat(http, "job:served-from@7")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    others = [
        stack.client.submit(
            {
                "kind": "serving", "name": f"other-{number}", "metadata": {"deployed": "on request"},
                "model": {"path": "job:served-from@0"},
            }
        ).id
        for number in range(3)
    ]  # fmt: skip
    full = chat(http, "job:adapted@final")
    assert (full.status_code, full.json()["error"]["code"]) == (503, "deployments_full")
    assert int(full.headers["retry-after"]) > 0
    for one in (*others, deployed[0].id):
        end(stack, one)
    assert say(http, model) == text, "another deployment takes its place"
    end(stack, deployments(stack)[0].id)


@pytest.mark.long
@pytest.mark.usefixtures("adapted")
def test_an_adapter_is_served_and_idleness_ends_it(stack: Any, http: httpx.Client) -> None:
    served = stack.client.submit(
        {"kind": "serving", "name": "adapted", "model": {"path": "job:adapted@final"}, "serving": {"idle_s": 1}}
    )
    assert say(http, "adapted") is not None
    record = stack.finish(served.id)
    assert (record.status.phase, "given back" in record.status.message) == ("succeeded", True), record.status.message


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[4, 5, 6]])).logits


def test_a_checkpoint_is_exported_as_a_hugging_face_folder(
    stack: Any, trained: str, earlier: int, tmp_path: Path
) -> None:
    done = stack.cli("export", f"served-from@{earlier}", "--to", str(tmp_path / "model"))
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert not names & {"optimizer.safetensors", "rng.safetensors", "manifest.json", "shards"}
    row = next(row for row in stack.client.checkpoints(trained) if row["number"] == earlier)
    expected = logits(AutoModelForCausalLM.from_pretrained(row["path"]))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False) == "1+2="
    card = (tmp_path / "model" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], "grpo" in front["tags"]) == ("transformers", True)
    made_by = f"| policy updates | {earlier} (policy version {earlier}) |"
    for fact in (row["digest"], trained, made_by, "at first", "torch"):
        assert fact in card
    again = stack.cli("export", f"served-from@{earlier}", "--to", str(tmp_path / "model"))
    assert (again.exit_code, "is not empty" in again.output) == (1, True)
    below = stack.cli("export", f"served-from@{earlier}", "--to", str(tmp_path / "model" / "README.md" / "copy"))
    assert (below.exit_code, below.output.startswith("error: cannot use ")) == (1, True), below.output


def test_an_adapter_is_exported_alone_or_merged(stack: Any, adapted: str, tmp_path: Path) -> None:
    alone, merged = tmp_path / "adapter", tmp_path / "merged"
    for folder, *options in ((alone,), (merged, "--merge-lora")):
        done = stack.cli("export", "adapted", "--to", str(folder), *options)
        assert done.exit_code == 0, done.output
    assert (alone / "adapter_model.safetensors").exists()
    assert not (alone / "model.safetensors").exists()
    assert not (merged / "adapter_config.json").exists()
    by_peft = logits(AutoPeftModelForCausalLM.from_pretrained(alone))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), by_peft, atol=1e-5, rtol=0)
    base = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), by_peft, atol=1e-4)
    assert yaml.safe_load((alone / "README.md").read_text().split("---")[1])["library_name"] == "peft"
    assert adapted in (merged / "README.md").read_text()


class Hub(BaseHTTPRequestHandler):
    """Stub of the hub's upload routes: ``server.created`` lists new repositories, ``server.files`` contents by path."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        """Answer a request of huggingface_hub; files come inline, none by LFS."""
        server: Any = self.server
        body, at = self.rfile.read(int(self.headers["content-length"] or 0)), f"http://{self.headers['host']}"
        assert self.headers["authorization"] == "Bearer hf_none"
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            server.created.append(json.loads(body))
            self.answer({"url": f"{at}/somebody/adder", "name": "somebody/adder"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path.startswith("/api/models/somebody/adder/preupload/"):
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif path.startswith("/api/models/somebody/adder/commit/"):
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            server.files |= {file["path"]: b64decode(file["content"]) for file in files}
            self.answer(
                {"success": True, "commitOid": "0" * 40, "commitUrl": f"{at}/somebody/adder/commit/0", "hookOutput": ""}
            )
        else:
            self.send_error(404)

    def answer(self, reply: dict[str, Any]) -> None:
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Any]:
    """Stub of the hub on this machine."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.files = [], {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push(stack: Any, job: str, folder: Path, port: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Export a job to ``folder/model`` and to the hub at ``port``, in a process, which reads the address at import."""
    script = "import sys; from penstock.cli.app import main; sys.argv[0] = 'penstock'; main()"
    command = ["export", job, "--to", str(folder / "model"), "--push-to-hub", "somebody/adder", *words]
    environment = {
        **os.environ, "PENSTOCK_URL": stack.stack.url, "PENSTOCK_API_KEY": KEY, "HF_TOKEN": "hf_none",
        "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder / "hub"),
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", script, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.long
def test_a_folder_is_pushed_to_the_hub(stack: Any, trained: str, hub: Any, tmp_path: Path) -> None:
    """A repo is private unless the user says otherwise."""
    for number, words in enumerate(((), ("--public",))):
        folder = tmp_path / str(number)
        ran = push(stack, trained, folder, hub.server_address[1], *words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert f"http://127.0.0.1:{hub.server_address[1]}/somebody/adder" in ran.stdout + ran.stderr
        written = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
        assert "model.safetensors" in hub.files
        assert hub.files == written
        hub.files.clear()
    assert [(repo["name"], repo["organization"], repo["visibility"]) for repo in hub.created] == [
        ("adder", "somebody", "private"), ("adder", "somebody", "public"),
    ]  # fmt: skip


@pytest.mark.long
def test_an_unreachable_hub_is_named(stack: Any, trained: str, tmp_path: Path) -> None:
    """No hub listens at the address; the exported folder is whole all the same."""
    ran = push(stack, trained, tmp_path, free_ports(1)[0])
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "is written, but the hub did not take it as 'somebody/adder'" in ran.stderr
    assert (tmp_path / "model" / "README.md").exists()
