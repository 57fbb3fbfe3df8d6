"""The megatron backend on two ranks computes what `local` computes. The numbers come from ``measure.py``.

Bounds, float32: scores 2e-5 (sums over width and vocabulary in another order), the same for the rest after five steps
of AdamW, whose epsilon keeps it from magnifying rounding. Copied values must agree in every bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from penstock.services.rollout.engines import EmbeddedEngine
from penstock.shared.protocol.generation import GenRequest, Sampling

EXPERTS = ["experts", "stages with experts", "experts dealt", "replayed"]
FLOAT32 = ["tensor", "sequence", "biases", "critic", "context", "data", "stages", "critic in stages", *EXPERTS]
BFLOAT16 = ["bfloat16", "bfloat16 in stages"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # the first test waits for the ranks
COPIES = ["initial bits", "loaded bits", "state bits"]


@pytest.mark.parametrize("case", [*FLOAT32, *BFLOAT16])
def test_what_is_copied_keeps_its_bits(measured: Any, case: str) -> None:
    assert {quantity: measured.worst(case, quantity) for quantity in COPIES} == dict.fromkeys(COPIES, 0.0)


@pytest.mark.parametrize("case", FLOAT32)
def test_scores_and_loss_are_those_of_local(measured: Any, case: str) -> None:
    assert measured.worst(case, "scores") < 2e-5
    assert measured.worst(case, "loss") < 2e-5
    if case not in ("data", "experts dealt") and "critic" not in case:
        assert measured.worst(case, "entropy and kl") < 2e-5
        assert measured.worst(case, "largest kl") > 1e-3, "the policies are too close for the test to show anything"
    if "critic" not in case:
        assert measured.worst(case, "reference") < 2e-5


@pytest.mark.parametrize("case", EXPERTS)
def test_routers_report_what_local_does(measured: Any, case: str) -> None:
    assert measured.worst(case, "router facts") < 1e-5


@pytest.mark.parametrize("case", FLOAT32)
def test_five_steps_lead_to_the_same_weights(measured: Any, case: str) -> None:
    assert measured.worst(case, "norm") < 1e-5
    assert measured.worst(case, "moved") > 1e-4
    assert measured.worst(case, "weights") < 2e-6
    assert measured.worst(case, "moments") < 1e-5


@pytest.mark.parametrize("case", FLOAT32)
def test_state_resumes_across_cuts_and_backends(measured: Any, case: str) -> None:
    assert measured.worst(case, "resumed") < 2e-6


@pytest.mark.parametrize("case", BFLOAT16)
def test_bfloat16_stays_within_its_rounding(measured: Any, case: str) -> None:
    assert measured.worst(case, "scores") < 0.1
    assert measured.worst(case, "norm") < 0.05
    assert measured.worst(case, "weights") < 0.02


def test_log_softmax_over_cut_columns_is_the_whole_one(measured: Any) -> None:
    assert measured.worst("log_softmax", "values") < 1e-13
    assert measured.worst("log_softmax", "gradient") < 1e-13


def logprobs_of(model: PreTrainedModel, ids: list[int], start: int) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]


async def test_the_export_is_a_model_that_engines_serve(measured: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(measured.export)
    model = AutoModelForCausalLM.from_pretrained(measured.export, dtype=torch.float32).eval()
    assert tokenizer.chat_template
    assert tokenizer.decode(tokenizer("1+2").input_ids) == "1+2"
    trainers = load_file(measured.export / "scores")["logprobs"]
    expected = torch.cat([logprobs_of(model, list(range(5, 25)), 4), logprobs_of(model, list(range(30, 45)), 4)])
    assert float((trainers - expected).abs().max()) < 2e-5

    engine = EmbeddedEngine(
        AutoModelForCausalLM.from_config(model.config).eval(), max_running=2, stop_ids=[2], detokenize=tokenizer.decode
    )
    await engine.start()
    try:
        await engine.begin_update(version=1, digest="d", mode="swap")
        await engine.load_chunk(load_file(measured.export / "model.safetensors"))
        await engine.commit_update()
        sampling = Sampling(max_new_tokens=40, ignore_eos=True, seed=1)
        (sample,) = (
            await engine.generate(GenRequest(request_id="a", prompt_ids=[5, 6, 7], n=1, sampling=sampling))
        ).samples
    finally:
        await engine.close()
    expected = logprobs_of(model, [5, 6, 7, *sample.token_ids], 3)
    assert float((torch.tensor(sample.logprobs) - expected).abs().max()) < 1e-4
