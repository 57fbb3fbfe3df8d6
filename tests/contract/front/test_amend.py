"""Changing a job that runs: what may change, from when on, preconditions, and checkpoints on request."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app as cli
from penstock.client import AsyncClient, Client
from penstock.shared.config.jobs.amendable import AMENDABLE, changed_keys, leaves, settings_of, with_patch
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError, Conflict, DeadlineError

NO_WAIT = {"wait": 0}


async def submitted(client: Any, job: Any) -> str:
    return f"/v1/jobs/{(await client.post('/v1/jobs', json=job)).json()['id']}"


def follow(deployment: Any, path: str, step: int) -> None:
    """Write the status of a job as the leader does once it has applied a change."""
    id = path.rpartition("/")[2]
    deployment.advance(id, "running", observed_generation=deployment.jobs[id].generation, applies_at_step=step)


async def test_a_change_names_the_update_from_which_it_applies(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, job)
        reply = await client.patch(path, json={"optimizer": {"learning_rate": 3e-4}}, params=NO_WAIT)
        assert (reply.status_code, reply.json()["applies_at_step"]) == (202, None)
        assert reply.json()["generation"] == 2
        spec = {**job, "optimizer": {"learning_rate": 3e-4}}
        assert JobConfig.parse(reply.json()["spec"]) == JobConfig.parse(spec)
        follow(deployment, path, 7)
        again = await client.patch(path, json={"metadata": {"team": "a"}}, params=NO_WAIT)
        assert again.json()["applies_at_step"] is None  # of generation 3 nothing was observed yet
        follow(deployment, path, 9)
        follow_up = await client.get(path)
        assert follow_up.json()["status"]["applies_at_step"] == 9


FIXED: list[tuple[dict[str, Any], list[str] | None, str]] = [
    ({"seed": 5}, ["/seed"], "immutable_field"),
    ({"train": {"batch_size": 16, "max_updates": 9}}, ["/train/batch_size"], "immutable_field"),
    ({"sampling": {"max_new_tokens": 5}}, ["/sampling/max_new_tokens"], "immutable_field"),
    ({"sampling": {"temperature": 0}}, [""], "invalid_job"),  # training needs one
    ({"algorithm": {"kl": {"coef": 0.1}}}, None, "immutable_field"),  # there is no KL to weigh
    ({"name": "other"}, ["/name"], "immutable_field"),
    ({"kind": "evaluation"}, ["/kind"], "immutable_field"),
    ({"data": {"train": {"type": "sorting"}}}, ["/data/train"], "immutable_field"),
    ({"train": None}, ["/train"], "immutable_field"),
    ({"train": {"max_updates": None}}, ["/train"], "invalid_job"),
    ({"train": {"max_updates": 0}}, ["/train/max_updates"], "invalid_job"),
    ({"train": {"max_update": 5}}, ["/train/max_update"], "invalid_job"),
    ({"limits": {"byte_budget": 2000}}, [""], "invalid_job"),
    ({"optimizer": {"learning_rate": "fast"}}, ["/optimizer/learning_rate"], "invalid_job"),
]


async def test_what_cannot_change_is_named(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, job)
        before = deployment.jobs
        for patch, pointers, code in FIXED:
            reply = await client.patch(path, json=patch)
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, code), (patch, reply.text)
            if pointers is not None:
                assert [flaw["pointer"] for flaw in reply.json()["errors"]] == pointers, patch
            assert deployment.jobs == before, patch
        same = await client.patch(path, json={"seed": 0, "name": "addition"}, params=NO_WAIT)
        assert same.status_code == 202  # values that are so already


async def test_what_may_change_is_listed_with_values_and_ranges(connect: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, {**job, "limits": {"timeout_s": 60}})
        rows = {row["key"]: row for row in (await client.get(f"{path}/amendable")).json()["data"]}
        assert set(rows) == set(AMENDABLE) - {"algorithm.kl.coef"}, "there is no KL to weigh"
        spec = JobConfig.parse((await client.get(path)).json()["spec"])
        assert {key: row["value"] for key, row in rows.items()} == {key: settings_of(spec)[key] for key in rows}
        rate, every, limit = (rows[key] for key in ("optimizer.learning_rate", "checkpoint.every", "limits.timeout_s"))
        assert (rate["type"], rate["minimum"], rate["above"], rate["optional"]) == ("number", None, 0, False)
        assert (every["type"], every["minimum"], every["above"], every["optional"]) == ("integer", 1, None, False)
        assert (limit["type"], limit["above"], limit["value"], limit["optional"]) == ("number", 0, 60, True)
        assert all(row["description"].endswith(".") for row in rows.values())
        adaptive = {"kl": {"coef": 0.1, "adaptive": {"target": 0.1}}}
        for kl, listed in (({"kl": {"coef": 0.1}}, True), (adaptive, False)):
            path = await submitted(client, {**job, "algorithm": {**job.get("algorithm", {}), **kl}})
            found = [row["key"] for row in (await client.get(f"{path}/amendable")).json()["data"]]
            assert ("algorithm.kl.coef" in found) is listed


async def test_a_backend_is_replaced_by_another_type_and_amended_key_by_key(connect: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, job)
        steps: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"type": "fsdp", "cpu_offload": True}, {"type": "fsdp", "cpu_offload": True}),
            (
                {"activation_checkpointing": True},
                {"type": "fsdp", "cpu_offload": True, "activation_checkpointing": True},
            ),
            ({"cpu_offload": None}, {"type": "fsdp", "activation_checkpointing": True}),
            ({"type": "megatron"}, {"type": "megatron"}),
            (
                {"type": "megatron", "activation_checkpointing": True},
                {"type": "megatron", "activation_checkpointing": True},
            ),
            ({"type": "local"}, {"type": "local"}),
        ]
        for patch, backend in steps:
            reply = await client.patch(path, json={"backend": patch}, params=NO_WAIT)
            assert (reply.status_code, reply.json()["spec"]["backend"]) == (202, backend), reply.text
        refused = await client.patch(path, json={"backend": {"type": "megatron", "tensor_parallel": 7}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_job")
        unknown = await client.patch(path, json={"backend": {"type": "fsdp", "tensor_parallel": 2}})
        assert unknown.json()["errors"][0]["pointer"] == "/backend/tensor_parallel", unknown.text
        reply = await client.patch(path, json={"backend": None}, params=NO_WAIT)
        assert "backend" not in reply.json()["spec"]


async def test_a_schedule_keeps_its_end_and_an_adaptive_kl_its_coefficient(connect: Any, job: Any) -> None:
    job["train"]["data_epochs"] = 1
    job["optimizer"] = {"schedule": "linear"}
    job["algorithm"]["kl"] = {"coef": 0.01}
    async with connect() as client:
        path = await submitted(client, job)
        reply = await client.patch(path, json={"train": {"max_updates": None}})
        assert "decays over the run" in reply.json()["detail"]
        critic = {"type": "ppo", "critic": {"optimizer": {"schedule": "cosine"}}}
        path = await submitted(client, {**job, "optimizer": {}, "algorithm": critic})
        reply = await client.patch(path, json={"train": {"max_updates": None}})
        assert (reply.status_code, reply.json()["errors"][0]["pointer"]) == (422, "/train/max_updates"), reply.text
        path = await submitted(client, job)
        changed = await client.patch(path, json={"algorithm": {"kl": {"coef": 0.02}}}, params=NO_WAIT)
        assert changed.json()["spec"]["algorithm"]["kl"]["coef"] == 0.02
        job["algorithm"]["kl"]["adaptive"] = {"target": 0.1}
        path = await submitted(client, job)
        refused = await client.patch(path, json={"algorithm": {"kl": {"coef": 0.02}}})
        assert refused.json()["error"]["code"] == "immutable_field"


async def test_if_match_fails_for_changes_of_others_only(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, job)
        etag = (await client.get(path)).headers["etag"]
        deployment.advance(path.rpartition("/")[2], "running")  # the coordinator observes something: nobody's change
        patch = {"train": {"max_updates": 9}}
        first = await client.patch(path, json=patch, headers={"if-match": etag}, params=NO_WAIT)
        assert first.status_code == 202
        patch = {"train": {"max_updates": 10}}
        lost = await client.patch(path, json=patch, headers={"if-match": etag}, params=NO_WAIT)
        assert (lost.status_code, lost.json()["error"]["code"]) == (412, "precondition_failed")
        assert lost.headers["etag"] == first.headers["etag"]
        listed = f'"x", {first.headers["etag"]}'
        assert (await client.patch(path, json=patch, headers={"if-match": listed}, params=NO_WAIT)).status_code == 202
        assert (await client.patch(path, json=patch, headers={"if-match": "*"}, params=NO_WAIT)).status_code == 202
        future = await client.patch(path, json=patch, headers={"if-match": '"999"'}, params=NO_WAIT)
        assert future.status_code == 412


async def test_a_job_that_has_ended_stays_as_it_is(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, job)
        deployment.advance(path.rpartition("/")[2], "succeeded")
        assert (await client.patch(path, json={"train": {"max_updates": 9}})).status_code == 409
        assert (await client.post(f"{path}/checkpoints")).status_code == 409
        merge = {"content-type": "application/merge-patch+json"}
        assert (await client.patch(path, content=b"{}", headers=merge)).status_code == 409
        text = {"content-type": "text/plain"}
        assert (await client.patch(path, content=b"{}", headers=text)).status_code == 415


async def test_jobs_are_found_by_kind_and_labels(connect: Any, job: Any) -> None:
    async with connect() as client:
        for team, stage in (("a", "dev"), ("a", "prod"), ("b", "dev")):
            await client.post("/v1/jobs", json={**job, "metadata": {"team": team, "stage": stage}})
        await client.post("/v1/jobs", json=job)

        async def count(query: str) -> int:
            return len((await client.get(f"/v1/jobs?{query}")).json()["data"])

        assert await count("metadata[team]=a") == 2
        assert await count("metadata[team]=a&metadata[stage]=dev") == 1
        assert await count("metadata%5Bteam%5D=c") == 0
        assert (await count("kind=rl"), await count("kind=evaluation"), await count("")) == (4, 0, 4)


async def test_a_checkpoint_on_request_is_an_operation(connect: Any, deployment: Any, job: Any) -> None:
    async with connect() as client:
        path = await submitted(client, job)
        asked = await client.post(f"{path}/checkpoints")
        assert (asked.status_code, asked.json()["state"]) == (202, "pending")
        where = asked.headers["location"]
        assert (await client.get(where)).json() == asked.json()
        deployment.finish(path.rpartition("/")[2], state="succeeded", result={"number": 4})
        assert (await client.get(f"{where}?wait=30")).json()["result"] == {"number": 4}
        assert (await client.get(f"{path}/operations/op_0")).status_code == 404


def test_clients_and_commands(served: Any, deployment: Any, job: Any) -> None:
    env = {"PENSTOCK_URL": served.url}
    with Client(served.url) as client:
        record = client.submit({**job, "metadata": {"team": "a"}})
        changed = client.amend(record.id, {"checkpoint": {"every": 3}}, revision=record.revision, wait_s=0)
        assert changed["spec"]["checkpoint"] == {"every": 3}
        with pytest.raises(Conflict, match="changed since"):
            client.amend(record.id, {"checkpoint": {"every": 4}}, revision=record.revision, wait_s=0)
        with pytest.raises(ConfigError, match="seed cannot change"):
            client.amend(record.id, {"seed": 4})
        assert [found.id for found in client.list(metadata={"team": "a"}, kind="rl")] == [record.id]
        with pytest.raises(DeadlineError):
            client.checkpoint_now(record.id, timeout_s=0)
        follow(deployment, f"/{record.id}", 5)
        result = CliRunner().invoke(cli, ["amend", record.id, "--set", "train.max_updates=11", "--wait", "0"], env=env)
        assert result.exit_code == 0, result.output
        assert client.get(record.id).spec["train"]["max_updates"] == 11
        warmer = ["amend", record.id, "--set", "sampling.temperature=0.8", "--wait", "0"]
        assert CliRunner().invoke(cli, warmer, env=env).exit_code == 0
        assert client.get(record.id).spec["sampling"]["temperature"] == 0.8
        listed = CliRunner().invoke(cli, ["ls", "--label", "team=b", "--json"], env=env)
        assert listed.stdout.strip() == "[]"
        deployment.advance(record.id, "failed")
        assert CliRunner().invoke(cli, ["ckpt", "save", record.id], env=env).exit_code == 1


async def test_the_async_client_too(served: Any, job: Any) -> None:
    async with AsyncClient(served.url) as client:
        record = await client.submit(job)
        assert (await client.amend(record.id, {"limits": {"timeout_s": 60}}, wait_s=0))["generation"] == 2
        with pytest.raises(DeadlineError):
            await client.checkpoint_now(record.id, timeout_s=0)


def test_keys_and_patches(job: Any) -> None:
    config = JobConfig.parse(job)
    assert set(settings_of(config)) == set(AMENDABLE)
    assert settings_of(config)["algorithm.kl.coef"] is None
    other = JobConfig.parse(with_patch(job, {"train": {"max_updates": 5}, "metadata": {"a": "b"}}))
    assert changed_keys(config, other) == ["metadata", "metadata.a", "train.max_updates"]
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert with_patch({"a": {"b": 1, "c": 2}}, {"a": {"b": None}, "e": {"f": None}}) == {"a": {"c": 2}, "e": {}}
