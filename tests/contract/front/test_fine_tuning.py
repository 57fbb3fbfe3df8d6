"""Files, graders and jobs in the shape of OpenAI's API."""

from __future__ import annotations

import asyncio
import io
import json
import os
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.services.coordinator.api.http.idempotency import Idempotency, ReplyStore
from penstock.services.coordinator.api.http.volatile import Volatile
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.files import FILES
from penstock.shared.errors import ConfigError, Conflict, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import Finished
from penstock.shared.protocol.scaling import ScaleReply

ROWS = [{"messages": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(10)]
CHECK = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{sample.output_text}}",
         "reference": "{{item.answer}}"}  # fmt: skip
BASE = {
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "algorithm": {"type": "rloo", "group_size": 4},
    "train": {"batch_size": 16, "data_epochs": 2, "max_lag": 1},
    "optimizer": {"learning_rate": 0.01},
    "sampling": {"max_new_tokens": 8},
    "evaluation": {"every": 10},  # where the request has a validation file
}


def jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name != "keys"]


async def uploaded(client: Any, data: bytes, purpose: str = "fine-tune", **more: Any) -> Any:
    return await client.post("/v1/files", files={"file": ("rows.jsonl", data)}, data={"purpose": purpose}, **more)


def request(file: str, **changes: Any) -> dict[str, Any]:
    reinforcement = {"grader": changes.pop("grader", CHECK), "hyperparameters": changes.pop("hyperparameters", {})}
    method = {"type": "reinforcement", "reinforcement": reinforcement}
    return {"model": "tiny", "training_file": file, "method": method, **changes}


@pytest.fixture
def tiny(connect: Any, tmp_path: Path) -> Any:
    """Return ``connect`` for a deployment with a base model."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(BASE))
    return partial(connect, base_models=tmp_path)


async def test_files_are_stored_listed_read_and_deleted(connect: Any) -> None:
    async with connect() as client:
        created = []
        for number in (1, 2, 3):
            reply = await uploaded(client, jsonl(ROWS[:number]) + b"\n")
            assert reply.status_code == 200, reply.text
            created.append(reply.json())
        assert [row["rows"] for row in created] == [1, 2, 3]
        first = (await client.get("/v1/files", params={"limit": 2})).json()
        assert [row["id"] for row in first["data"]] == [created[2]["id"], created[1]["id"]]
        assert first["has_more"]
        rest = (await client.get("/v1/files", params={"limit": 2, "after": first["last_id"]})).json()
        assert [row["id"] for row in rest["data"]] == [created[0]["id"]]
        content = await client.get(f"/v1/files/{created[1]['id']}/content")
        assert content.content == jsonl(ROWS[:2]) + b"\n"
        gone = await client.delete(f"/v1/files/{created[0]['id']}")
        assert gone.json() == {"id": created[0]["id"], "object": "file", "deleted": True}
        for path in (f"/v1/files/{created[0]['id']}", "/v1/files/..%2F..", "/v1/files/file-x/content"):
            assert (await client.get(path)).status_code == 404


async def test_bad_uploads_are_refused_with_the_line(connect: Any) -> None:
    async with connect() as client:
        bad = await uploaded(client, b'{"a": 1}\n\n[1]\n{"a": \n')
        assert (bad.status_code, bad.json()["error"]["code"]) == (422, "invalid_file")
        assert [flaw["pointer"] for flaw in bad.json()["errors"]] == ["/file/line/3", "/file/line/4"]
        assert "line 3: must be an object, found list" in bad.json()["detail"]
        assert (await uploaded(client, b"\n\n")).status_code == 422
        assert (await uploaded(client, b"{}", "batch")).json()["errors"][0]["pointer"] == "/purpose"
        plain = await client.post("/v1/files", json={"purpose": "fine-tune"})
        assert plain.status_code == 415
        broken = await client.post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data"})
        assert broken.status_code == 400
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_a_model_is_uploaded_for_job_files(
    deployment: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job file names the model by id, which becomes a directory; the file stays while a job needs it."""
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(deployment.data_dir))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("config.json", json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    spec = {
        "name": "own", "data": {"train": {"type": "addition"}, "prompt": {"max_tokens": 8}},
        "reward": {"scorers": [{"type": "exact"}]}, "algorithm": {"group_size": 4}, "sampling": {"max_new_tokens": 8},
        "train": {"batch_size": 8, "max_updates": 3},
    }  # fmt: skip
    async with connect() as client:
        created = (await uploaded(client, packed.getvalue(), "model")).json()
        assert (created["purpose"], created["rows"], created["bytes"]) == ("model", 0, len(packed.getvalue()))
        job = {**spec, "model": {"path": created["id"], "tokenizer": "char"}}
        reply = await client.post("/v1/jobs", json=job)
        assert reply.status_code == 202, reply.text
        place = Path(reply.json()["spec"]["model"]["path"])
        assert (place, json.loads((place / "config.json").read_bytes())["model_type"]) == (
            deployment.data_dir / FILES / created["id"] / "model", "qwen3",
        )  # fmt: skip
        used = await client.delete(f"/v1/files/{created['id']}")
        assert (used.status_code, "reads file" in used.json()["detail"]) == (409, True)
        assert (await client.get(f"/v1/files/{created['id']}/content")).status_code == 404
        questions = (await uploaded(client, jsonl(ROWS))).json()["id"]
        data = spec["data"] | {"train": {"type": "file", "path": questions}, "prompt": {"template": "{answer}+1"}}
        adapter = {"name": "adapted", "data": data, "model": job["model"] | {"lora": {}}}
        tuned = await client.post("/v1/jobs", json=job | adapter)
        assert tuned.status_code == 202, tuned.text
        for one in (reply, tuned):
            deployment.advance(one.json()["id"], "cancelled")
        unneeded = await client.delete(f"/v1/files/{questions}")
        assert unneeded.status_code == 200, "a finished job needs no data"
        adapted = await client.delete(f"/v1/files/{created['id']}")
        assert (adapted.status_code, "delete the job first" in adapted.text) == (409, True), adapted.text
        rows = (await uploaded(client, jsonl(ROWS))).json()["id"]
        for path, words in ((rows, "is a data set, not a model"), (f"file-{'0' * 32}", "no file")):
            refused = await client.post("/v1/jobs", json={**job, "model": {"path": path, "tokenizer": "char"}})
            assert (refused.status_code, words in refused.text) == (422, True), refused.text
        tuned = await client.post(
            "/v1/fine_tuning/jobs", json=request(created["id"], model=f"job:{reply.json()['id']}@0")
        )
        assert (tuned.status_code, "is a model, not a data set" in tuned.text) == (422, True), tuned.text
        bad = await uploaded(client, jsonl(ROWS), "model")
        assert (bad.status_code, bad.json()["errors"][0]["pointer"]) == (422, "/file")


async def test_uploads_are_bounded_and_the_same_one_twice_is_one_file(connect: Any, deployment: Any) -> None:
    root = deployment.data_dir / FILES
    left = root / f"file-{'0' * 32}"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    key = {"Idempotency-Key": "k"}
    async with connect(files_bytes=1 << 20, max_files=2) as client:
        first, again = [await uploaded(client, jsonl(ROWS[:1]), headers=key) for _ in range(2)]
        assert again.json() == first.json()
        assert not left.exists()
        other = await uploaded(client, jsonl(ROWS[1:2]), headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        full = await uploaded(client, jsonl(ROWS) * 2000)
        assert (full.status_code, full.json()["error"]["code"]) == (507, "files_full")
        assert (await uploaded(client, jsonl(ROWS[1:2]))).status_code == 200
        assert (await uploaded(client, b"{}")).status_code == 507
        assert (await uploaded(client, jsonl(ROWS[:1]), headers=key)).json() == first.json()
        assert (await client.delete(f"/v1/files/{first.json()['id']}")).status_code == 200
        assert (await uploaded(client, jsonl(ROWS[1:2]), headers=key)).status_code == 200
        stored = {row["id"] for row in (await client.get("/v1/files")).json()["data"]}
    assert {path.name for path in folders(root)} == stored


async def test_an_upload_is_not_read_before_its_key_is_checked() -> None:
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": read < 9}

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 403, "headers": []})

    async def sent(message: Any) -> None:
        assert message["status"] == 403

    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": [(b"idempotency-key", b"k")]}
    await Idempotency(refuse, ReplyStore(Volatile(None)))(scope, receive, sent)
    assert read == 0


async def test_a_request_becomes_a_job(deployment: Any, tiny: Any) -> None:
    async with tiny() as client:
        file, held_out = [(await uploaded(client, jsonl(rows))).json()["id"] for rows in (ROWS, ROWS[:3])]
        given = {
            "n_epochs": 4,
            "batch_size": 5,
            "learning_rate_multiplier": 0.5,
            "compute_multiplier": 2,
            "eval_samples": 3,
        }
        body = request(
            file, hyperparameters=given, validation_file=held_out, suffix="My run!", seed=7, metadata={"a": "b"}
        )
        reply = await client.post("/v1/fine_tuning/jobs", json=body)
        assert reply.status_code == 200, reply.text
        job = reply.json()
        assert (job["object"], job["status"], job["model"], job["seed"]) == ("fine_tuning.job", "queued", "tiny", 7)
        assert (job["training_file"], job["validation_file"]) == (file, held_out)
        assert job["method"] == body["method"]
        assert job["hyperparameters"] == {"n_epochs": 4, "batch_size": 5, "learning_rate_multiplier": 0.5}
        spec = JobConfig.model_validate(deployment.jobs[job["id"]].spec)
        assert (spec.name, spec.metadata, spec.algorithm.type, spec.algorithm.group_size) == (
            "ft-my-run", {"a": "b"}, "rloo", 8,
        )  # fmt: skip
        assert (spec.train.batch_size, spec.train.data_epochs, spec.train.max_updates, spec.train.max_lag) == (
            40,
            4,
            8,
            1,
        )
        assert spec.optimizer.learning_rate == 0.005
        assert (spec.evaluation.every, spec.evaluation.num_prompts, spec.evaluation.samples) == (10, 3, 3)
        assert spec.reward.scorers[0].type == "grader"
        assert spec.data.prompt.messages == "messages"
        assert (await client.get(f"/v1/jobs/{job['id']}")).json()["fine_tuning"]["base"] == "tiny"
        busy = await client.delete(f"/v1/files/{file}")
        assert (busy.status_code, busy.headers["x-should-retry"]) == (409, "false")
        auto = (await client.post("/v1/fine_tuning/jobs", json=request(file))).json()
        assert auto["hyperparameters"] == {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 1.0}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt-4o-mini"}, "/model"),
    ({"model": "job:job_0@final"}, "/model"),
    ({"training_file": "file-nothing"}, "/training_file"),
    ({"validation_file": "file-nothing"}, "/validation_file"),
    ({"method": {"type": "supervised", "supervised": {}}}, "/method/type"),
    ({"method": {"type": "dpo"}}, "/method/type"),
    ({"method": {"type": "reinforcement"}}, "/method/reinforcement"),
    ({"hyperparameters": {"reasoning_effort": 1}}, "/method/reinforcement/hyperparameters/reasoning_effort"),
    ({"hyperparameters": {"n_epochs": 0}}, "/method/reinforcement/hyperparameters/n_epochs"),
    ({"hyperparameters": {"eval_samples": 2}}, "/method/reinforcement/hyperparameters/eval_samples"),
    ({"hyperparameters": {"batch_size": 90_000}}, "/model"),
    ({"grader": {**CHECK, "reference": "{{item.nope}}"}}, "/training_file/line/1"),
    ({"grader": {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "x"}]}},
     "/method/reinforcement/grader"),
    ({"suffix": ""}, "/suffix"),
    ({"metadata": {"k": "v" * 513}}, "/metadata/k"),
    ({"unknown": 1}, "/unknown"),
]  # fmt: skip


async def test_bad_requests_point_at_the_field(deployment: Any, tiny: Any) -> None:
    async with tiny() as client:
        file = (await uploaded(client, jsonl(ROWS))).json()["id"]
        for changes, pointer in BAD:
            reply = await client.post("/v1/fine_tuning/jobs", json=request(file, **changes))
            assert reply.status_code == 422, reply.text
            assert str(reply.json()["error"]["param"]).startswith(pointer), reply.text
    assert not deployment.jobs


async def test_a_bad_base_model_file_is_named(deployment: Any, tiny: Any, tmp_path: Path) -> None:
    flaws: list[tuple[Any, str]] = [
        ({"train": {"max_updates": "many"}}, "tiny.yaml"),
        ({"algorithm": {"type": "grpoo"}}, "tiny.yaml"),
        ({"data": []}, "tiny.yaml"),
        ({"reward": {"timeout_s": 1}}, "timeout_s"),
        ({"modle": {}}, "modle"),
        ({"train": {"max_lags": 1}}, "max_lag"),
    ]
    async with tiny() as client:
        file = (await uploaded(client, jsonl(ROWS))).json()["id"]
        for changes, words in flaws:
            (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**BASE, **changes}))
            reply = await client.post("/v1/fine_tuning/jobs", json=request(file))
            assert (reply.status_code, reply.json()["error"]["param"]) == (422, "/model"), reply.text
            assert words in reply.json()["detail"]
    assert not deployment.jobs


async def test_rows_that_cannot_be_trained_on_are_refused_with_the_line(deployment: Any, tiny: Any) -> None:
    ends = {"messages": [*ROWS[0]["messages"], {"role": "assistant", "content": "1"}], "answer": "1"}
    rows = [ROWS[0], {"messages": [], "answer": "1"}, {"messages": ROWS[1]["messages"]}, ends]
    async with tiny() as client:
        file = (await uploaded(client, jsonl(rows))).json()["id"]
        reply = (await client.post("/v1/fine_tuning/jobs", json=request(file))).json()
    assert [flaw["pointer"] for flaw in reply["errors"]] == [f"/training_file/line/{n}" for n in (2, 3, 4)]
    assert "'answer'" in reply["errors"][1]["detail"]
    assert "assistant" in reply["errors"][2]["detail"]


async def test_jobs_are_listed_steered_and_watched(deployment: Any, tiny: Any, job: Any) -> None:
    async with tiny() as client:
        file = (await uploaded(client, jsonl(ROWS))).json()["id"]
        labels = ({"n": "0"}, {"n": "1"}, {"n": "0"})
        created = [
            (await client.post("/v1/fine_tuning/jobs", json=request(file, metadata=label))).json()["id"]
            for label in labels
        ]
        other = (await client.post("/v1/jobs", json=job)).json()["id"]
        page = (await client.get("/v1/fine_tuning/jobs", params={"limit": 2})).json()
        assert ([row["id"] for row in page["data"]], page["has_more"]) == ([created[2], created[1]], True)
        rest = (await client.get("/v1/fine_tuning/jobs", params={"limit": 2, "after": created[1]})).json()
        assert ([row["id"] for row in rest["data"]], rest["has_more"]) == ([created[0]], False)
        labelled = (await client.get("/v1/fine_tuning/jobs", params={"metadata[n]": "0"})).json()["data"]
        assert [row["id"] for row in labelled] == [created[2], created[0]]
        assert (await client.get(f"/v1/fine_tuning/jobs/{other}")).status_code == 404
        assert (await client.post(f"/v1/fine_tuning/jobs/{other}/cancel")).status_code == 404

        base = f"/v1/fine_tuning/jobs/{created[0]}"
        for verb, desired in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            assert (await client.post(f"{base}/{verb}")).status_code == 200
            assert deployment.jobs[created[0]].desired_state == desired
        for number in range(3):
            deployment.emit(created[0], "step", f"update {number}")
        newest = (await client.get(f"{base}/events", params={"limit": 3})).json()
        assert [row["message"] for row in newest["data"]] == ["update 2", "update 1", "update 0"]
        older = (await client.get(f"{base}/events", params={"after": newest["data"][-1]["id"]})).json()
        steered = [f"{verb}, by key local" for verb in ("cancel", "resume", "pause")]
        assert ([row["message"] for row in older["data"]], older["has_more"]) == (steered, False)
        assert (await client.get(f"{base}/events", params={"after": "x"})).status_code == 422
        deployment.advance(created[0], "failed", message="the trainer gave up")
        failed = (await client.get(base)).json()
        assert (failed["status"], failed["error"]["message"]) == ("failed", "the trainer gave up")
        final = deployment.save(created[1], 8, {"config.json": b"{}"})
        deployment.record(created[1], Finished(writer_epoch=1, time=0.0, reason="succeeded", summary={}))
        deployment.advance(created[1], "succeeded")
        done = (await client.get(f"/v1/fine_tuning/jobs/{created[1]}")).json()
        assert done["fine_tuned_model"] == f"job:{created[1]}@final"
        again = await client.post("/v1/fine_tuning/jobs", json=request(file, model=done["fine_tuned_model"]))
        assert again.status_code == 200, again.text
        record = deployment.jobs[again.json()["id"]]
        assert record.spec["model"] == {"path": str(final), "tokenizer": "char"}
        assert (record.origin.job, record.origin.model) == (created[1], f"job:{created[1]}@final")
        assert (await client.get(f"{base}/checkpoints")).json()["data"] == []


async def test_graders_answer_with_typed_errors(connect: Any, deployment: Any) -> None:
    deployment.grade()
    multi = {"type": "multi", "name": "m", "graders": {"a": CHECK, "b": {**CHECK, "operation": "ilike"}},
             "calculate_output": "1 / (a - b)"}  # fmt: skip
    async with connect() as client:
        for path in ("/v1/graders", "/v1/fine_tuning/alpha/graders"):
            run = await client.post(f"{path}/run", json={"grader": CHECK, "model_sample": "2", "item": {"answer": "2"}})
            assert run.status_code == 200, run.text
            assert (run.json()["reward"], run.json()["metadata"]["execution_time"]) == (1.0, 0.25)
            assert not any(run.json()["metadata"]["errors"].values())
        lacks = (await client.post("/v1/graders/run", json={"grader": CHECK, "model_sample": "2"})).json()
        assert lacks["metadata"]["errors"]["invalid_variable_error"] is True
        zero = (
            await client.post("/v1/graders/run", json={"grader": multi, "model_sample": "2", "item": {"answer": "2"}})
        ).json()
        assert (zero["sub_rewards"], zero["reward"]) == ({"a": 1.0, "b": 1.0}, 0.0)
        assert zero["metadata"]["errors"]["formula_parse_error"] is True
        assert (await client.post("/v1/graders/validate", json={"grader": multi})).json() == {"grader": multi}
        python = {"grader": {"type": "python", "name": "p", "source": "x"}}
        refused = await client.post("/v1/graders/validate", json=python)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_grader")
        errors = (await client.post("/v1/graders/run", json={**python, "model_sample": ""})).json()["metadata"][
            "errors"
        ]
        assert (errors["python_grader_runtime_error"], errors["python_grader_runtime_error_details"]) == (
            True,
            "the source defines no function grade(sample, item)",
        )


async def test_both_clients_and_the_command_line(served: Any, deployment: Any, tmp_path: Path) -> None:
    deployment.grade()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl(ROWS))
    with Client(served.url) as client:
        one = client.files.upload(path)
        assert client.files.show(one.id).rows == 10
        assert client.graders.run(CHECK, "1", {"answer": "1"}).reward == 1.0
        with pytest.raises(ConfigError, match="defines no function grade"):
            client.graders.validate({"type": "python", "name": "p", "source": "x"})
    async with AsyncClient(served.url) as client:
        other = await client.files.upload(path)
        assert [row.id for row in await client.files.list()] == [other.id, one.id]
        await client.files.delete(other.id)
        with pytest.raises(NotFound):
            await client.files.show(other.id)

    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, list(words), env={"PENSTOCK_URL": served.url})

    created = run("files", "upload", str(path)).stdout.strip()
    assert created in run("files", "ls").stdout
    assert run("files", "rm", created).exit_code == 0
    path.write_text("{\n")
    assert run("files", "upload", str(path)).exit_code == 2
    (tmp_path / "grader.yaml").write_text(yaml.safe_dump(CHECK))
    good = run("grade", str(tmp_path / "grader.yaml"), "--sample", "1", "--item", '{"answer": "1"}')
    assert (good.exit_code, good.stdout.strip()) == (0, "1")
    bad = run("grade", str(tmp_path / "grader.yaml"), "--sample", "1")
    assert bad.exit_code == 1
    assert "invalid_variable_error" in bad.output


async def test_scaling(connect: Any, served: Any, deployment: Any, job: Any) -> None:
    deployment.serve(subjects.SCALE, lambda _: asyncio.sleep(0, pack(ScaleReply(replicas=1, ready=1, leaving=0))))
    async with connect() as client:
        id = (await client.post("/v1/jobs", json=job)).json()["id"]
        reply = await client.post(f"/v1/jobs/{id}/scale", json={"pool": "rollout", "replicas": 3})
        assert (reply.status_code, reply.json()["kind"]) == (202, "scale")
        assert deployment.jobs[id].operations[-1].args == {"pool": "rollout", "replicas": 3}
        assert (await client.get(reply.headers["location"])).json()["state"] == "pending"
        for body in ({"pool": "trainer", "replicas": 1}, {"pool": "env"}, {"pool": "env", "replicas": -1}):
            assert (await client.post(f"/v1/jobs/{id}/scale", json=body)).status_code == 422
        deployment.stop_serving()
        refused = await client.post(f"/v1/jobs/{id}/scale", json={"pool": "env", "replicas": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_supervised")
        assert "docker compose up --scale env=2" in refused.json()["detail"]
    with Client(served.url) as blocking, pytest.raises(Conflict, match="nobody here starts processes"):
        blocking.scale(id, "rollout", 2)
    wrong = CliRunner().invoke(cli, ["scale", id, "trainer=2"], env={"PENSTOCK_URL": served.url})
    assert wrong.exit_code == 2
