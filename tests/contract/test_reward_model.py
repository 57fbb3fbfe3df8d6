"""The reward model scorer: a tiny classifier whose outputs are known."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from penstock.services.reward.pool import ScorerPool
from penstock.services.reward.scorers.reward_model import RewardModel, weights_digest
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rewards.scorers import RewardModelScorer
from penstock.shared.errors import ScoringError
from penstock.shared.protocol.messages import ScoreRequest


def open_model(folder: Path, **changes: Any) -> RewardModel:
    return RewardModel(RewardModelScorer.parse({"path": str(folder), **changes}))


@pytest.fixture
def copy(classifier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(classifier, tmp_path / "model"))


@pytest.mark.parametrize("format", ["chat", "plain"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_scores_do_not_depend_on_batches_or_padding(classifier: Path, batch_size: int, format: str) -> None:
    texts = ["12", "3", "", "a long text that ends in 3", "2", "4", "1" * 300 + "2"]
    model = open_model(classifier, batch_size=batch_size, format=format)
    expected = [1.0, -1.0, 0.0, -1.0, 1.0, 0.0, 1.0]
    assert list(model.score_group("p", texts, None, {})) == pytest.approx(expected, abs=1e-5)


def test_model_without_padding_token_scores_one_by_one(copy: Path) -> None:
    config = AutoConfig.from_pretrained(copy)
    config.pad_token_id = None
    config.save_pretrained(copy)
    assert list(open_model(copy).score_group("p", ["12", "3", ""], None, {})) == pytest.approx([1, -1, 0], abs=1e-5)


def test_probability(classifier: Path) -> None:
    (score,) = open_model(classifier, output="probability").score_group("p", ["2"], None, {})
    assert score == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-5)


def test_messages_of_the_row_come_first(classifier: Path) -> None:
    model = open_model(classifier, messages="chat")
    row = {"chat": [{"role": "user", "content": "the end is 2"}]}
    assert list(model.score_group("3", ["", "3"], None, row)) == pytest.approx([1.0, -1.0], abs=1e-5)
    with pytest.raises(ScoringError, match="the row has no field 'chat'"):
        model.score_group("3", [""], None, {})


def test_long_text_fails_alone(classifier: Path) -> None:
    short, long = open_model(classifier, max_tokens=8).score_group("p", ["2", "2" * 8], None, {})
    assert short == pytest.approx(1.0, abs=1e-5)
    assert "9 tokens, more than max_tokens 8" in str(long)


def test_nan_is_a_failure(copy: Path) -> None:
    model = Qwen2ForSequenceClassification.from_pretrained(copy)
    with torch.no_grad():
        model.model.embed_tokens.weight[AutoTokenizer.from_pretrained(copy).convert_tokens_to_ids("3")] = math.nan
    model.save_pretrained(copy)
    good, bad = open_model(copy, batch_size=1).score_group("p", ["2", "3"], None, {})
    assert good == pytest.approx(1.0, abs=1e-5)
    assert "the reward model's output is nan" in str(bad)


def test_several_outputs_need_a_label(copy: Path) -> None:
    config = AutoConfig.from_pretrained(copy)
    config.num_labels = 3
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(copy)
    with pytest.raises(ScoringError, match="the model has 3 outputs; choose one by `label`"):
        open_model(copy)
    with pytest.raises(ScoringError, match="label 3 of a model with 3 outputs"):
        open_model(copy, label=3)
    scores = [open_model(copy, label=i, output="probability").score_group("p", ["2"], None, {})[0] for i in range(3)]
    assert sum(score for score in scores if isinstance(score, float)) == pytest.approx(1.0, abs=1e-5)


def test_model_without_a_trained_head_is_refused(copy: Path) -> None:
    """Without the check, a language model would load with a head of random weights."""
    Qwen2ForCausalLM(AutoConfig.from_pretrained(copy)).save_pretrained(copy)
    with pytest.raises(ScoringError, match=r"lacks the weights score\.weight; a model without a trained head"):
        open_model(copy)


def test_directory_that_cannot_be_used_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=r"holds no config\.json"):
        open_model(tmp_path / "missing")
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(copy)
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ScoringError, match="no chat template; use `format: plain`"):
        open_model(copy)
    tokenizer.add_tokens([f"word{i}" for i in range(64)])
    tokenizer.save_pretrained(copy)
    with pytest.raises(ScoringError, match="the model 64"):
        open_model(copy, format="plain")
    (copy / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ScoringError, match="cannot load"):
        open_model(copy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_reported(classifier: Path) -> None:
    with pytest.raises(ScoringError, match="torch sees no GPU"):
        open_model(classifier, device="cuda")


def test_digest_knows_every_byte(copy: Path) -> None:
    before = weights_digest(copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(data))
    assert weights_digest(copy) != before


@pytest.mark.long
async def test_model_is_loaded_once_per_process_and_reported(classifier: Path) -> None:
    spec = {"type": "reward_model", "path": str(classifier), "weight": 0.5}
    pool = ScorerPool(RewardConfig.parse({"scorers": [spec], "timeout_s": 60.0, "open_timeout_s": 110.0}), 1)
    await pool.start()
    try:
        assert pool.about == {"reward_model": f"{classifier} sha256:{weights_digest(classifier)[:16]} on cpu"}
        reply = await pool.score(ScoreRequest(prompt="p", completions=["2", "x" * 5000], answer=None, row={}))
    finally:
        await pool.close()
    assert reply.rewards == pytest.approx([0.5, 0.0], abs=1e-5)
    assert reply.failed == [False, True]
