"""The GSM8K examples load, and the full one runs on a Hugging Face model directory: prompt, group, score."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.demo.command import demo_options
from penstock.local import StackOptions
from penstock.services.reward.scorers import open_scorer
from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.episode import build_group, completion_texts, requests_for
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.check import check_data
from penstock.shared.data.prompts import PromptSource
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol.generation import GenRequest
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.trajectory import Group

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = [
    ("Nina sold 48 cakes in May, half as many in June. How many?", "<<48/2=24>>24. 48+24 = <<48+24=72>>72\n#### 72"),
    ("A pen costs $3. What do 4 pens cost?", "It is 3*4 = $<<3*4=12>>12.\n#### 12"),
]
TEST = [("Tom has 90 beans, eats 25. How many are left?", "90-25 = <<90-25=65>>65, not <<3*4=12>>12\n#### 65")]


def write_rows(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train.jsonl` and `test.jsonl` in GSM8K's format, and `model`: random weights with a byte-level BPE."""
    root = tmp_path_factory.mktemp("gsm8k")
    write_rows(root / "train.jsonl", TRAIN)
    write_rows(root / "test.jsonl", TEST)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([text for row in TRAIN for text in row], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|eos|>")
    tokenizer.save_pretrained(root / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    return root


def load_example(name: str, *overrides: str) -> JobConfig:
    return JobConfig.parse(with_overrides(load_yaml(EXAMPLES / name), overrides))


def of_files(files: Path) -> list[str]:
    """Return overrides that make the full example use these files and a model this small."""
    paths = {"model": "model", "data.train": "train.jsonl", "data.eval": "test.jsonl"}
    overrides = [f"{key}.path={files / name}" for key, name in paths.items()]
    return [*overrides, "model.dtype=float32", "sampling.max_new_tokens=12", "algorithm.group_size=4"]


def full(files: Path) -> JobConfig:
    return load_example("gsm8k.yaml", *of_files(files))


async def generate(config: JobConfig, ordinal: int) -> tuple[Group, str]:
    """Return a group as a rollout worker creates it, and the text of the prompt that the tokenizer decodes."""
    tokenizer = build_tokenizer(config.model)
    prompt = PromptSource(config.data, tokenizer, config.seed).train(ordinal)
    assert not prompt.too_long
    engine = open_engine(config.model, tokenizer, max_running=8, seed=config.seed)
    [(sampling, n)] = requests_for(config, Ticket(draw=Draw(ordinal), epoch=1, deadline=0.0, min_version=0))
    await engine.start()
    try:
        request = GenRequest(request_id="r", prompt_ids=prompt.token_ids, sampling=sampling, n=n)
        result = await asyncio.wait_for(engine.generate(request), 30)
    finally:
        await engine.close()
    texts = completion_texts(
        result.samples, tokenizer.decode, stop_tokens=frozenset(engine.stop_ids), stop=sampling.stop_strings
    )
    group = build_group(
        job="j",
        draw=Draw(ordinal),
        epoch=1,
        worker="w",
        prompt=prompt,
        samples=result.samples,
        texts=texts,
        temperature=sampling.temperature,
        num_greedy=0,
        seconds=0.0,
    )
    return group, str(tokenizer.decode(prompt.token_ids))


def test_full_example_generates_and_scores_a_group(files: Path) -> None:
    config = full(files)
    group, seen = asyncio.run(generate(config, 0))
    row = group.meta["row"]
    assert seen == group.meta["prompt"]
    assert seen == f"Question: {row['question']}\nThink step by step and write the final number after ####.\nAnswer:"
    assert group.num_trajectories == 4
    assert not group.failed.any()
    assert np.isfinite(group.logprobs).all()
    assert all("Question:" not in text for text in group.meta["completions"])
    scorer = open_scorer(config.reward.scorers[0])
    final = row["answer"].rpartition("#### ")[2]
    completions = [*group.meta["completions"], f"I add them up.\n#### {final}", "I add them up.\n#### 71"]
    scores = [float(scorer.score(seen, c, group.meta["answer"], row)) for c in completions]  # type: ignore[arg-type]
    assert scores == [0.0] * 4 + [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" Half of 48 is 24, and 48 + 24 = 72.\n#### 72", 1.0),
        (" #### 72.0", 1.0),
        (" #### $72", 1.0),
        (" 72 cakes in May.\n#### 48", 0.0),
        (" #### 720", 0.0),
        (" ####", 0.0),
    ],
)
def test_full_example_scores_the_final_answer(files: Path, completion: str, score: float) -> None:
    config = full(files)
    question, answer = TRAIN[0]
    assert open_scorer(config.reward.scorers[0]).score(question, completion, answer, {}) == score


def test_full_example_reads_both_files(files: Path) -> None:
    summary = check_data(full(files).data)
    assert (summary.rows_per_epoch, summary.num_eval) == (2, 1)


def test_calculator_example_excludes_training_rows_from_evaluation(files: Path) -> None:
    train = {"path": str(files / "train.jsonl")}
    held_out = {"path": str(files / "test.jsonl"), "exclude_path": train["path"]}
    spec: dict[str, Any] = load_yaml(EXAMPLES / "gsm8k-calc.yaml")
    assert spec["data"]["eval"].keys() >= held_out.keys()
    spec["data"]["train"].update(train, skip=0)
    spec["data"]["eval"].update(held_out)
    spec["warm_start"]["data"][0].update(train, limit=2)
    config = JobConfig.parse(spec)
    source = PromptSource(config.data, build_tokenizer(config.model), config.seed)
    assert {source.train(i).text for i in range(source.rows_per_epoch)} == {"48/2=", "48+24=", "3*4="}
    assert [source.eval(i).text for i in range(source.num_eval)] == ["90-25="]
    demonstrations = PromptSource(config.warm_start_data, build_tokenizer(config.model), config.seed)
    assert {demonstrations.train(i).text for i in range(demonstrations.rows_per_epoch)} == {"48/2=", "48+24="}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
def test_full_example_trains_in_a_demo(
    files: Path, nursery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs ``penstock demo`` with the job file for real models, shortened, from its first process to its summary."""

    def quick(directory: Path, *, rollouts: int = 1) -> StackOptions:
        options = demo_options(directory, rollouts=rollouts)
        environment = {**options.environment, "PENSTOCK_HEARTBEAT_S": "0.3"}
        return replace(options, launch=nursery.launch, environment=environment, drain_s=5)

    monkeypatch.setattr("penstock.cli.demo.command.demo_options", quick)
    short = ["train.batch_size=8", "train.max_updates=2", "evaluation.every=1", "evaluation.num_prompts=1"]
    words = [word for change in [*of_files(files), *short] for word in ("--set", change)]
    data = tmp_path / "data"
    result = CliRunner().invoke(app, ["demo", "--file", str(EXAMPLES / "gsm8k.yaml"), "--data-dir", str(data), *words])
    assert result.exit_code == 0, result.output
    output = result.stdout
    assert "gsm8k: succeeded after 2 updates" in output
    assert "sampled reward  0.000 -> 0.000" in output, "random weights solve nothing"
    assert re.search(r"groups +drawn (\d+) = trained 4 \+ dropped", output), output
    assert re.search(r"audit +passed\n", output), output
    assert "eval/greedy 0.000" in output, "held-out questions were scored"
    found = re.search(r"checkpoint +(/\S+)", output)
    assert found is not None, output
    trained = AutoModelForCausalLM.from_pretrained(found[1])
    initial = AutoModelForCausalLM.from_pretrained(files / "model")
    assert trained.config.hidden_size == initial.config.hidden_size
    row = json.loads((files / "train.jsonl").read_text().splitlines()[0])
    text = f"{row['question']} #### 72"
    ids = AutoTokenizer.from_pretrained(files / "model")(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(found[1])(text)["input_ids"] == ids
    assert re.search(r"penstock up --detach --data-dir \S+ +# the same deployment again", output), output
