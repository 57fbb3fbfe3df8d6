"""Mistakes in job files, which are named before a job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.client import calls
from penstock.client.answers import default_headers
from penstock.services.coordinator.api.http.documents import from_yaml
from penstock.services.coordinator.problems import HttpProblem
from penstock.services.coordinator.submission import plan_job
from penstock.shared.config.base import load_yaml, parse_yaml
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError

JOB: dict[str, Any] = {
    "name": "file",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 5},
}
TWICE = "name: a\ntrain:\n  seed: 1\n  epochs: 2\n  seed: 3\n"


def test_a_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(TWICE)
    with pytest.raises(ConfigError, match=r"at line 5, column 3: the key 'seed' stands here and at line 3"):
        load_yaml(file)
    with pytest.raises(HttpProblem, match=r"at line 5, column 3: the key 'seed' stands here and at line 3"):
        from_yaml(TWICE.encode())


def test_a_file_that_is_empty_or_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^standard input is empty: it must hold a mapping"):
        parse_yaml("# nothing\n", where="standard input")
    with pytest.raises(ConfigError, match=r"^a.yaml must hold a mapping of keys to values, found list$"):
        parse_yaml("- a", where="a.yaml")


def test_a_merged_mapping_may_override_keys() -> None:
    """Keys of one letter, which Python stores only once in memory, and lists of merged mappings work, too."""
    text = "a: &a {x: 1, yy: 2}\nb: &b {<<: *a, x: 3, yy: 6}\nc: {<<: *b, yy: 4}\nd: {<<: [*a, *b], =: 5}\n"
    assert parse_yaml(text, where="text")["c"] == {"x": 3, "yy": 4}
    assert from_yaml(text.encode())["d"] == {"x": 1, "yy": 2, "=": 5}
    with pytest.raises(ConfigError, match=r"at line 1, column 9: '<<' must name a mapping, or a list of mappings"):
        parse_yaml("a: {<<: 3}", where="text")


def test_a_completion_that_leaves_no_room_is_refused_with_the_parts_of_its_length() -> None:
    tools = {"tools": [{"type": "calculator"}], "max_turns": 5, "max_observation_tokens": 128}
    with pytest.raises(ConfigError) as refused:
        parse_job({**JOB, "environment": tools, "sampling": {"max_new_tokens": 24}})
    assert (
        "sampling.max_new_tokens 24 + 4 x environment.max_observation_tokens 128 (environment.max_turns - 1) = 536 "
        "leaves no room for a prompt: the model takes 512 tokens"
    ) in str(refused.value)


@pytest.mark.parametrize("exists", [False, True])
async def test_a_missing_tokenizer_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "tokenizer"
    if exists:
        folder.mkdir()
    spec = parse_job({**JOB, "model": {"config": {}, "tokenizer": str(folder)}})
    flaw = "holds no tokenizer: none of tokenizer.json" if exists else "does not exist"
    with pytest.raises(ConfigError, match=f"model.tokenizer: '.*tokenizer' {flaw}"):
        await plan_job(spec, [], ServiceSettings(), stores_parts=True)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").touch()
    assert (await plan_job(spec, [], ServiceSettings(), stores_parts=True))["warnings"] == []


async def test_code_in_the_folder_of_a_model(tmp_path: Path) -> None:
    """Without ``trust_remote_code`` a warning says that the code is not run; with it, a missing file is an error."""
    classes = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "org/other--own.Model",
        "AutoTokenizer": ["t.T", None],
    }
    described = {"model_type": "own", "auto_map": classes}
    (tmp_path / "config.json").write_bytes(orjson.dumps(described))

    async def warned(trusted: bool) -> list[str]:
        model = {"path": str(tmp_path), "trust_remote_code": trusted}
        spec = parse_job({**JOB, "model": model, "rollout": {"engine": "transformers"}})
        warnings: list[str] = (await plan_job(spec, [], ServiceSettings(), stores_parts=True))["warnings"]
        return warnings

    (warning,) = await warned(False)
    assert "(AutoConfig, AutoModelForCausalLM, AutoTokenizer), which is not run" in warning
    assert "set model.trust_remote_code: true" in warning
    with pytest.raises(ConfigError, match=r"names the code 'own\.Config', and own\.py is not there"):
        await warned(True)
    (tmp_path / "own.py").touch()
    assert await warned(True) == []
    (tmp_path / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    assert await warned(False) == []


@pytest.mark.parametrize(
    ("described", "flaw"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2', and the embedded engine decodes llama, qwen2"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "with a sliding window"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "qwen3", "attention_dropout": 0.1}, "attention_dropout"),
    ],
)
@pytest.mark.parametrize("kind", ["rl", "serving"])
async def test_a_model_that_our_decoder_does_not_know_is_refused_with_the_way_out(
    tmp_path: Path, described: dict[str, Any], flaw: str, kind: str
) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps(described))
    model = {"path": str(tmp_path)}
    job = {**JOB, "model": model} if kind == "rl" else {"kind": "serving", "name": "served", "model": model}
    with pytest.raises(ConfigError) as refused:
        await plan_job(parse_job(job), [], ServiceSettings(), stores_parts=True)
    assert flaw in str(refused.value)
    assert "; rollout.engine: transformers runs any causal language model by its own forward pass" in str(refused.value)
    other = parse_job({**job, "rollout": {"engine": "transformers"}})
    assert "spec" in await plan_job(other, [], ServiceSettings(), stores_parts=True)


async def test_an_adapter_that_cannot_be_trained_is_refused_for_every_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "gpt2"}')
    for engine in ("embedded", "vllm", "transformers"):
        model = {"path": str(tmp_path), "lora": {"publish": "merged"}}
        job = parse_job({**JOB, "model": model, "rollout": {"engine": engine}})
        with pytest.raises(ConfigError, match=r"^model\.lora: .*adapters are trained only on models that it decodes"):
            await plan_job(job, [], ServiceSettings(), stores_parts=True)


@pytest.mark.parametrize(
    ("described", "rollout", "flaw"),
    [
        ({"model_type": "gpt2", "n_positions": 32}, {}, "sampling.max_new_tokens 40 leaves no room for a prompt: the"),
        ({"model_type": "gpt2", "n_positions": 64}, {"max_length": 65}, "rollout.max_length 65: the model takes 64"),
        ({"model_type": "bloom"}, {"max_length": 40}, "leaves no room for a prompt: rollout.max_length is 40"),
        (
            {
                "model_type": "phi3", "max_position_embeddings": 128, "original_max_position_embeddings": 40,
                "rope_parameters": {"rope_type": "longrope"},
            },
            {}, "the model takes 40 tokens",
        ),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 40}}, {}, "the model takes 40 tokens"),
        ({"model_type": "bloom"}, {}, ""),
        ({"model_type": "gpt2", "n_positions": 64}, {"max_length": 41}, ""),
    ],
)  # fmt: skip
async def test_texts_too_long_for_any_model_are_refused_at_submission(
    tmp_path: Path, described: dict[str, Any], rollout: dict[str, Any], flaw: str
) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps(described))
    rollout = {"engine": "transformers", **rollout}
    changes = {"model": {"path": str(tmp_path)}, "rollout": rollout, "sampling": {"max_new_tokens": 40}}
    spec = parse_job({**JOB, **changes})
    if not flaw:
        assert "spec" in await plan_job(spec, [], ServiceSettings(), stores_parts=True)
        return
    with pytest.raises(ConfigError) as refused:
        await plan_job(spec, [], ServiceSettings(), stores_parts=True)
    assert flaw in str(refused.value)


def test_the_client_takes_the_path_of_a_file_as_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\n")
    assert orjson.loads(calls.submit(calls.text_of(str(file)), None).body or b"") == {"name": "a"}
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.yaml: No such file"):
        calls.text_of(str(tmp_path / "nothing.yaml"))


def test_several_metrics_may_be_given_as_a_list() -> None:
    assert (
        calls.view("job", "metrics", names=["reward/mean", "length/mean"]).query()["names"] == "reward/mean,length/mean"
    )


def test_an_api_key_with_invalid_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds characters that no key has"):
        default_headers("…", "http://127.0.0.1:8000")
