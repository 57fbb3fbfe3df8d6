"""Rights that a key needs for jobs that name code to run or files of the machine to read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.config.base import StrictModel, named
from penstock.shared.config.jobs.job import JobConfig

ROOT = {"authorization": "Bearer root"}
MODULE = "team_a.scorers:length"


async def key(client: Any, *scopes: str, **more: Any) -> dict[str, str]:
    body = {"name": "k", "scopes": ["jobs:write", *scopes], **more}
    reply = await client.post("/v1/keys", json=body, headers=ROOT)
    assert reply.status_code == 201, reply.text
    return {"authorization": f"Bearer {reply.json()['key']}"}


def with_code(job: dict[str, Any], place: str = "scorer") -> dict[str, Any]:
    """Return a copy of the job that names user code in ``place``."""
    job = copy.deepcopy(job)
    if place == "scorer":
        job["reward"]["scorers"] = [{"type": "function", "path": MODULE}]
    elif place == "tool":
        tool = {"type": "function", "name": "t", "description": "d", "parameters": {"type": "object"}, "path": MODULE}
        job["environment"] = {"type": "tools", "tools": [tool], "max_observation_tokens": 8, "max_turns": 1}
    elif place == "engine":
        job["rollout"] = {"engine": "class", "path": MODULE}
    elif place == "curriculum":
        job["data"]["curriculum"] = MODULE
    else:
        job["model"] = {"path": "org/model", "trust_remote_code": True}
    return job


async def refusal(client: Any, job: dict[str, Any], caller: dict[str, str]) -> str:
    """Submit a job; return the error code if it is refused, or an empty string."""
    reply = await client.post("/v1/jobs", json=job, headers=caller)
    assert reply.status_code in (202, 403), reply.text
    return "" if reply.status_code == 202 else str(reply.json()["error"]["code"])


@pytest.mark.parametrize("place", ["scorer", "tool", "engine", "curriculum", "model"])
async def test_a_job_that_names_code_needs_the_scope_for_it(connect: Any, job: Any, place: str) -> None:
    async with connect(api_keys="root") as client:
        writer, coder = await key(client), await key(client, "jobs:code")
        assert await refusal(client, job, writer) == ""
        assert await refusal(client, with_code(job, place), writer) == "missing_scope"
        dry = await client.post("/v1/jobs?dry_run=true", json=with_code(job, place), headers=writer)
        assert dry.status_code == 403, "validation opens files and imports nothing for who may not"
        assert await refusal(client, with_code(job, place), ROOT) == ""
        assert await refusal(client, with_code(job, place), coder) in ("", "other_path")


async def test_modules_are_those_of_the_deployment_and_of_the_key(connect: Any, job: Any) -> None:
    async with connect(api_keys="root", code_modules="team_a, penstock_examples") as client:
        coded, foreign = with_code(job), with_code(job)
        foreign["reward"]["scorers"][0]["path"] = "team_ab.scorers:f"
        assert await refusal(client, coded, ROOT) == ""
        assert await refusal(client, foreign, ROOT) == "other_code", "a prefix ends where a module does"
        assert await refusal(client, coded, await key(client, "jobs:code")) == ""
        own = {"models": [job["name"]]}
        assert await refusal(client, coded, await key(client, "jobs:code", **own)) == "other_code"
        assert (
            await refusal(client, coded, await key(client, "jobs:code", **own, code_modules=["team_a.scorers"])) == ""
        )
        assert await refusal(client, coded, await key(client, "jobs:code", code_modules=["team_b"])) == "other_code"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"env": {"taskset": {"id": "words"}}}, "environment.env.taskset.id: 'words' is not among"),
        ({"path": f"words@{'0' * 64}"}, f"environment.path: 'words@{'0' * 64}' is not among"),
    ],
)
async def test_modules_of_tasksets_are_those_of_the_deployment(
    connect: Any, job: Any, environment: dict[str, Any], said: str
) -> None:
    tasks = {**job["data"], "train": {"type": "tasks", "num_rows": 4}}
    played = {
        **job, "data": tasks, "reward": {"scorers": [{"type": "environment"}]},
        "environment": {"type": "verifiers", "max_turns": 1, **environment},
    }  # fmt: skip
    async with connect(api_keys="root", code_modules="team_a") as client:
        reply = await client.post("/v1/jobs?dry_run=true", json=played, headers=ROOT)
        assert reply.status_code == 403, reply.text
        assert reply.json()["error"]["message"].startswith(said)


async def test_files_lie_below_the_directories_for_jobs(connect: Any, job: Any, tmp_path: Path) -> None:
    inside, outside = tmp_path / "jobs", tmp_path / "private"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (inside / "link").symlink_to(outside)

    def reading(path: Path | str) -> dict[str, Any]:
        return {**job, "data": {"train": {"type": "file", "path": str(path)}}}

    async with connect(api_keys="root") as client:
        writer = await key(client)
        assert await refusal(client, reading(outside / "rows.jsonl"), ROOT) == ""
        assert await refusal(client, reading(inside / "rows.jsonl"), writer) == "other_path", "none are configured"
        assert await refusal(client, {**job, "model": {"path": "org/model"}}, writer) == ""
    async with connect(api_keys="root", job_roots=str(inside)) as client:
        for caller in (await key(client), ROOT):
            assert await refusal(client, reading(inside / "rows.jsonl"), caller) == ""
            for path in (
                outside / "rows.jsonl",
                inside / "link" / "rows.jsonl",
                inside / ".." / "private",
                "~nobody/x",
            ):
                assert await refusal(client, reading(path), caller) == "other_path", path
            assert await refusal(client, {**job, "model": {"path": "/etc"}}, caller) == "other_path"


async def test_a_simulator_is_given_no_code_and_no_file_without_the_right(connect: Any, tmp_path: Path) -> None:
    def acting(task: str = "CartPole-v1", **options: Any) -> dict[str, Any]:
        simulator = {"task": task, "horizon": 10, "bytes_per_step": 256, "options": options}
        return {"kind": "embodied", "name": "arm", "environment": simulator, "train": {"max_updates": 1}}

    (tmp_path / "scene.xml").write_text("<mujoco/>")
    async with connect(api_keys="root") as client:
        writer = await key(client)
        assert await refusal(client, acting(), writer) == ""
        assert await refusal(client, acting("my_module:Arm-v0"), writer) == "missing_scope"
        scene = str(tmp_path / "scene.xml")
        for options in ({"xml_file": scene}, {"assets": [{"file": scene}]}, {"xml_file": "~/scene.xml"}):
            assert await refusal(client, acting(**options), writer) == "other_path", options
    async with connect(api_keys="root", job_roots=str(tmp_path)) as client:
        assert await refusal(client, acting(xml_file=scene), await key(client)) == ""


def test_every_field_that_names_code_or_a_file_is_marked() -> None:
    """Fields with such names must carry the mark in new scorers and sources, too."""
    seen: set[type[StrictModel]] = set()

    def below(model: type[StrictModel]) -> None:
        if model not in seen:
            seen.add(model)
            for each in model.__subclasses__():
                below(each)

    below(StrictModel)
    names = {"path", "exclude_path", "tokenizer", "teacher", "function", "curriculum", "python"}
    unmarked = [
        f"{model.__name__}.{name}"
        for model in seen
        for name, field in model.model_fields.items()
        if name in names
        and field.annotation in (str, str | None)
        and not {"code", "file"} & set(map(str, field.metadata))
    ]
    assert unmarked == []
    spec = {"model": {"path": "/m"}, "data": {"train": {"type": "file", "path": "/d"}},
            "reward": {"scorers": [{"type": "function", "path": "a:b"}]}, "name": "n",
            "algorithm": {"group_size": 2}, "train": {"batch_size": 2, "max_updates": 1}}  # fmt: skip
    parsed = JobConfig.parse(spec)
    assert dict(named(parsed, "file")) == {"model.path": "/m", "data.train[0].path": "/d"}
    assert dict(named(parsed, "code")) == {"reward.scorers[0].path": "a:b"}


async def test_lines_of_the_logs_that_name_no_job_are_for_admins(connect: Any, deployment: Any, job: Any) -> None:
    async with connect(api_keys="root") as client:
        owner = await key(client, "jobs:read")
        id = (await client.post("/v1/jobs", json=job, headers=owner)).json()["id"]
        deployment.write_log(id)
        deployment.advance(id, "succeeded")
        for caller, is_shown in ((owner, False), (ROOT, True)):
            lines = (await client.get(f"/v1/jobs/{id}/logs", headers=caller)).json()["lines"]
            followed = (await client.get(f"/v1/jobs/{id}/logs?follow=true", headers=caller)).text
            assert {f"line 0 of {id}" in found for found in (followed, {line["text"] for line in lines})} == {True}
            assert {"about no job" in followed, "about no job" in {line["text"] for line in lines}} == {is_shown}
