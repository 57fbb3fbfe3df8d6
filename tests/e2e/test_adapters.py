"""A job with adapters and one with experts on a whole stack: sampler and trainer agree, and the log can be replayed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.protocol.events import BatchTrained

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

UPDATES = 5
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
ALPHABET = {"tokenizer": "char", "characters": "0123456789+="}
EXPERTS = {"arch": "qwen3_moe", "intermediate_size": 16, "experts": {"number": 8, "per_token": 2}}
MODELS = {
    "adapters": {"config": SIZES, **ALPHABET, "lora": {"rank": 8}},
    "experts": {"config": {**SIZES, **EXPERTS}, **ALPHABET, "moe": {"router_replay": True, "aux_loss_coef": 0.01}},
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_sampler_and_trainer_agree_to_the_end(stack: Any, kind: str) -> None:
    warm = {"steps": 3 if kind == "adapters" else 0}
    rate = "optimizer.learning_rate=0.02"  # large steps, so that stale weights of the sampler show at once
    changes = (rate, "train.max_lag=0", f"train.max_updates={UPDATES}")
    job = stack.submit(*changes, name=kind, model=MODELS[kind], warm_start=warm)
    end = stack.finish(job, seconds=90)
    assert (end.status.phase, end.status.step) == ("succeeded", UPDATES)
    digests = [event.digest for event in stack.ledger(job) if isinstance(event, BatchTrained)]
    assert len(set(digests)) == UPDATES, "the policy did not move: the test proves nothing"
    series = stack.client.metrics(job, names="mismatch/logprob")["series"]["mismatch/logprob"]
    mismatch = [value for value in series if value is not None]
    assert len(mismatch) > 2
    assert max(mismatch) < 1e-4, "the sampler serves other weights than the trainer trains"
    tables = [group.experts for group in stack.groups(job).values()]
    assert all((table is not None) is (kind == "experts") for table in tables)
    stack.check_audit(job)
    stack.check_replay(job, at_least=UPDATES)
