"""A GPT-2, which our own decoder does not know, is trained to add: engine and trainer run its own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from penstock.shared.config.model import ModelConfig
from penstock.shared.models.loading import build_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]

CHARACTERS = "0123456789+="


@pytest.fixture
def file(make_job: Any, tmp_path: Path) -> Path:
    """File of a job that trains a GPT-2 of a folder, built from a config, to add."""
    folder = tmp_path / "gpt2"
    tokenizer = build_tokenizer(ModelConfig.parse({"config": {}, "tokenizer": "char", "characters": CHARACTERS}))
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    size = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    job = make_job(
        "name=gpt2", "train.max_lag=0", "train.max_updates=12", "train.batch_size=64", "algorithm.group_size=8",
        "optimizer.learning_rate=3e-4",
        model={"path": str(folder)}, reward={"scorers": [{"type": "exact"}]}, rollout={"engine": "transformers"},
        warm_start={"steps": 150, "batch_size": 32, "learning_rate": 3e-3},
    )  # fmt: skip
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_model_that_our_decoder_does_not_know_is_trained_to_add(stack: Any, file: Path) -> None:
    refused = stack.cli("submit", str(file), "--dry-run", "--set", "rollout.engine=embedded")
    assert refused.exit_code == 2, refused.output
    told = " ".join(refused.output.split())
    assert "has model_type 'gpt2', and the embedded engine decodes llama, qwen2" in told
    assert "rollout.engine: transformers runs any causal language model" in told

    submitted = stack.cli("submit", str(file))
    assert submitted.exit_code == 0, submitted.output
    job = stack.client.find("gpt2").id
    record = stack.finish(job, 120)
    assert (record.status.phase, record.status.step) == ("succeeded", 12), record.status
    series = stack.client.metrics(job)["series"]
    assert max(series["mismatch/logprob"]) < 1e-4
    assert min(series["reward/mean"]) > 0.1, "the warm start taught it something; a random text is hardly ever right"
    assert min(series["optimizer/grad_norm"]) > 0
    versions = {int(row[1]) for group in stack.groups(job).values() for row in group.spans}
    assert versions == set(range(12)), "strictly on-policy: each update samples with the version before it"
    stack.check_audit(job)
    stack.check_replay(job, 1)
