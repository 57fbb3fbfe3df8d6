"""The engine that a job file names: its options, its limits, and the workers that have it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.submission import check_packages
from penstock.services.rollout.engines import lacks_engine, weights_alone
from penstock.shared.config.base import load_yaml
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.rollout import (
    EmbeddedConfig,
    SglangConfig,
    TransformersConfig,
    VllmConfig,
    VllmServerConfig,
)
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.messages import Heartbeat

JOB: dict[str, Any] = {
    "name": "engine",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}, "eval": {"type": "addition", "num_rows": 8}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 1},
    "rollout": {"engine": "vllm"},
}
ONLINE: dict[str, Any] = {
    "name": "live", "kind": "online_rl", "model": JOB["model"], "rollout": {"engine": "vllm"},
}  # fmt: skip
MOE = {
    "arch": "qwen3_moe", "experts": {"number": 4, "per_token": 2}, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2,
}  # fmt: skip


def engine(name: str, job: dict[str, Any]) -> dict[str, Any]:
    path = {"path": "own_engine:Engine"} if name == "class" else {}
    return {**job, "rollout": {"engine": name, **path}}


def test_a_job_names_its_engine_and_options() -> None:
    assert parse_job(engine("sglang", JOB)).rollout == SglangConfig()
    assert parse_job(engine("transformers", JOB)).rollout == TransformersConfig()
    assert parse_job({**JOB, "rollout": {}}).rollout == EmbeddedConfig()
    assert parse_job({k: v for k, v in JOB.items() if k != "rollout"}).rollout == EmbeddedConfig()
    assert parse_job({**JOB, "rollout": {"engine": "vllm"}}).rollout == VllmConfig()
    assert parse_job({**JOB, "rollout": {"engine": "vllm_server", "kv_cache_gib": 2}}).rollout == VllmServerConfig(
        kv_cache_gib=2
    )


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vlm"}, "rollout.engine: found 'vlm'; did you mean 'vllm'?"),
        ({"engine": "embedded", "kv": 4}, "rollout.kv: unknown key of 'embedded'"),
        ({"engine": "own:Engine"}, "rollout: engine: name a class of yours by engine: class and path: 'own:Engine'"),
        ({"engine": "class", "path": "own"}, "rollout.path: "),
    ],
)
def test_a_wrong_engine_or_option_is_named(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_job({**JOB, "rollout": rollout})
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["vllm", "vllm_server", "sglang", "class"])
@pytest.mark.parametrize(
    ("job", "key"),
    [
        ({**JOB, "model": {**JOB["model"], "lora": {}}}, "model.lora.publish"),
        ({**JOB, "model": {**JOB["model"], "config": MOE, "moe": {"router_replay": True}}}, "model.moe.router_replay"),
        ({**JOB, "model": {**JOB["model"], "dtype": "bfloat16", "fp32_head": True}}, "model.fp32_head"),
        ({**ONLINE, "online": {"posted": {"held_versions": 2}}}, "online.posted.held_versions"),
        ({**ONLINE, "algorithm": {"kl": {"coef": 0.01}}, "online": {"promotion": {"max_kl": 0.1}}}, "online.promotion"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_its_key(job: dict[str, Any], key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.engine '{name}' cannot do {key}"):
        parse_job(engine(name, job))
    parse_job(engine("embedded", job))


def test_the_engine_of_any_model_refuses_router_replay_alone() -> None:
    replay = {**JOB["model"], "config": MOE, "moe": {"router_replay": True}}
    with pytest.raises(ConfigError, match=r"rollout.engine 'transformers' cannot do model\.moe\.router_replay"):
        parse_job(engine("transformers", {**JOB, "model": replay}))
    caps = TransformersConfig.caps
    assert replace(caps, routers=True) == EmbeddedConfig.caps
    assert not lacks_engine(TransformersConfig(), ServiceSettings())


def test_every_engine_has_a_rule_for_updates() -> None:
    for name in ("embedded", "transformers", "vllm", "vllm_server", "sglang", "class"):
        assert parse_job(engine(name, JOB)).rollout.on_update == "keep"
        for rule in ("restart", "drain"):
            job = engine(name, JOB)
            assert parse_job({**job, "rollout": {**job["rollout"], "on_update": rule}}).rollout.on_update == rule


@pytest.mark.parametrize(("rule", "modes"), [("keep", ("abort",)), ("drain", ("abort",)), ("restart", ("keep",))])
def test_an_engine_that_cannot_do_the_rule_for_updates_is_refused(
    rule: str, modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SglangConfig, "caps", replace(SglangConfig.caps, pause_modes=modes))
    with pytest.raises(ConfigError, match=f"rollout.engine 'sglang' cannot do rollout.on_update: '{rule}'"):
        parse_job({**JOB, "rollout": {"engine": "sglang", "on_update": rule}})


AGENT = {
    **JOB, "environment": {"tools": [{"type": "calculator"}], "max_turns": 2, "max_observation_tokens": 32},
}  # fmt: skip


@pytest.mark.parametrize("rule", ["restart", "drain"])
def test_jobs_without_updated_training_completions_refuse_a_rule_for_updates(rule: str) -> None:
    rollout = {"engine": "embedded", "on_update": rule}
    deployment = {"kind": "serving", "name": "deployed", "model": JOB["model"]}
    evaluation = {key: JOB[key] for key in ("name", "model", "reward")} | {
        "kind": "evaluation", "data": {"eval": {"type": "addition", "num_rows": 8}}, "evaluation": {"num_prompts": 8},
    }  # fmt: skip
    for job in (deployment, evaluation):
        with pytest.raises(ConfigError, match=r"rollout\.on_update: the weights of this job never change"):
            parse_job({**job, "rollout": rollout})
    with pytest.raises(ConfigError, match=r"rollout\.on_update: live answers go on"):
        parse_job({**ONLINE, "rollout": rollout})


def test_episodes_are_not_restarted() -> None:
    parse_job({**AGENT, "rollout": {"on_update": "drain"}})
    with pytest.raises(ConfigError, match=r"rollout\.on_update 'restart': an episode may have changed its environment"):
        parse_job({**AGENT, "rollout": {"on_update": "restart"}})


def test_merged_adapters_suit_an_engine_without_adapters() -> None:
    parse_job({**JOB, "model": {**JOB["model"], "lora": {"publish": "merged"}}})


def test_an_evaluation_names_its_engine() -> None:
    job = {key: JOB[key] for key in ("name", "model", "reward", "rollout")} | {
        "kind": "evaluation", "data": {"eval": {"type": "addition", "num_rows": 8}}, "evaluation": {"num_prompts": 8},
    }  # fmt: skip
    assert parse_job(job).rollout == VllmConfig()
    with pytest.raises(ConfigError, match=r"model\.lora\.publish"):
        parse_job({**job, "model": {**JOB["model"], "lora": {}}})


def test_a_deployment_names_its_engine() -> None:
    job = {"kind": "serving", "name": "deployed", "model": JOB["model"], "rollout": {"engine": "vllm"}}
    assert parse_job(job).rollout == VllmConfig()
    with pytest.raises(ConfigError, match="penstock up --engine vllm"):
        check_packages(parse_job(job), workers(a=["torch"]), 100.0)
    with pytest.raises(ConfigError, match=r"rollout.engine 'vllm' cannot do model\.fp32_head"):
        parse_job({**job, "model": {**JOB["model"], "dtype": "bfloat16", "fp32_head": True}})


def workers(**packages: list[str]) -> Members:
    found = Members()
    for worker, own in packages.items():
        beat = Heartbeat(
            service="rollout", worker=worker, host="h", pid=1, started=0.0, interval_s=1.0, health_port=1, ready=True,
            jobs={}, packages=own,
        )  # fmt: skip
        found.on_heartbeat(beat, 100.0)
    return found


@pytest.mark.parametrize("name", ["vllm", "vllm_server", "sglang"])
def test_a_job_whose_engine_no_worker_has_is_refused_with_the_command_that_adds_one(name: str) -> None:
    job = parse_job(engine(name, JOB))
    with pytest.raises(ConfigError, match=f"penstock up --engine {name}"):
        check_packages(job, workers(a=["torch"]), 100.0)
    assert check_packages(job, workers(a=["torch"], b=["torch", name]), 100.0) == [], "one is enough"


def test_a_worker_has_the_engines_of_its_engines_directory(tmp_path: Path) -> None:
    assert ServiceSettings(engines_dir=tmp_path).engines == []
    assert ServiceSettings(engines_dir=tmp_path, sglang_url="http://127.0.0.1:30000").engines == ["sglang"]
    for environment, engines in {"sglang": ["sglang"], "vllm": ["vllm_server", "sglang"]}.items():
        python = tmp_path / environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert ServiceSettings(engines_dir=tmp_path).engines == engines


def test_a_worker_in_the_interpreter_of_vllm_starts_its_server_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    settings = ServiceSettings(engines_dir=tmp_path / "engines")
    assert (settings.vllm_interpreter, lacks_engine(VllmServerConfig(), settings)) == (None, True)
    monkeypatch.syspath_prepend(tmp_path)
    assert (settings.vllm_interpreter, lacks_engine(VllmServerConfig(), settings)) == (Path(sys.executable), False)
    chosen = settings.model_copy(update={"vllm_python": tmp_path / "vllm" / "__init__.py"})
    assert chosen.vllm_interpreter == tmp_path / "vllm" / "__init__.py"


def test_an_engine_reads_only_the_model_files_of_a_checkpoint(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "optimizer.safetensors"):
        (tmp_path / name).write_text(name)
    folder = weights_alone(tmp_path)
    found = {file.name: file.read_text() for file in folder.iterdir()}
    shutil.rmtree(folder)
    assert found == {name: name for name in found}
    assert sorted(found) == ["config.json", "model-00001-of-00002.safetensors", "model.safetensors"]
    assert (tmp_path / "model.safetensors").is_file(), "links are removed, not their targets"


def test_an_example_has_the_embedded_engine() -> None:
    assert parse_job(load_yaml(Path("examples/addition.yaml"))).rollout.engine == "embedded"
