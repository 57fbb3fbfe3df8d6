"""A job that vLLM decodes, through the whole system: rollout workers run in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from penstock.shared.protocol.events import BatchTrained

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

UPDATES = 30
MISMATCH = 1e-4
"""Largest mean difference of log-probs between vLLM and the trainer, in float32."""


def test_a_job_learns_from_what_vllm_writes(
    deploy: Callable[..., Any], make_job: Callable[..., Any], tmp_path: Path, python_with: Callable[[str], Path]
) -> None:
    deployment = deploy(tmp_path / "vllm", pythons={"rollout": python_with("vllm")})
    deployment.ready_s = 400.0  # an interpreter of its own imports its own torch
    with deployment as stack:
        job = stack.client.submit(
            make_job(
                f"train.max_updates={UPDATES}", "train.draw_timeout_s=600", "train.batch_size=64",
                "optimizer.learning_rate=1e-3",
                "model.config.num_heads=1", "model.config.num_kv_heads=1",  # heads of 32, the smallest that it has
                rollout={"engine": "vllm", "kv_cache_gib": 0.25},
            )
        ).id  # fmt: skip
        assert stack.finish(job, 900).status.step == UPDATES
        series = stack.client.metrics(job, names="reward/mean,mismatch/logprob")["series"]
        rewards = series["reward/mean"]
        assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1, rewards
        assert max(value for value in series["mismatch/logprob"] if value is not None) < MISMATCH
        stack.check_books(job)
        digests = {event.version: event.digest for event in stack.ledger(job) if isinstance(event, BatchTrained)}
        spans = [span for group in stack.groups(job).values() for span in labels(group)]
        assert len({version for version, _ in spans}) > 2, "vLLM followed the versions"
        assert all(digests[version].startswith(weights) for version, weights in spans if version in digests)


def labels(group: Any) -> list[tuple[int, str]]:
    """Version and short digest of the weights of each span of a group."""
    return [(int(row[1]), weights) for row, weights in zip(group.spans, group.weights, strict=True)]
