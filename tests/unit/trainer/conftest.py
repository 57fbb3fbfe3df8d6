"""A tiny policy, and batches of groups as a sampler of that policy would have produced them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group

VOCAB = 48


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Any:
    """Run torch with one thread, since results are bit-identical for a fixed number of threads only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_config() -> Callable[..., JobConfig]:
    """Return a function that builds a job with a 2-layer model of 40 thousand parameters; it merges given sections."""

    def make(**sections: dict[str, Any]) -> JobConfig:
        architecture = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "max_position_embeddings": 64}
        data: dict[str, Any] = {
            "name": "tiny",
            "seed": 11,
            "model": {"config": architecture, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"group_size": 4},
            "sampling": {"max_new_tokens": 16, "temperature": 0.7},
            "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5},
            "train": {"batch_size": 16, "max_updates": 20},
        }
        for name, section in sections.items():
            data[name] = {**data.get(name, {}), **section}
        return JobConfig.parse(data)

    return make


@pytest.fixture
def make_teacher(tmp_path: Path, make_config: Callable[..., JobConfig]) -> Callable[..., str]:
    """Return a function that saves a larger model, with ``changes`` to its section of the job, and returns its path."""

    def make(**changes: Any) -> str:
        architecture = {"hidden_size": 48, "intermediate_size": 96, "num_layers": 3, "max_position_embeddings": 64}
        source = ModelConfig.model_validate({"config": architecture, "tokenizer": "char", **changes})
        tokenizer = build_tokenizer(source)
        path = tmp_path / "teacher"
        build_model(source, len(tokenizer), seed=77).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return make


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """Return a function that builds a group of given rewards; its log-probs are close to those of a fresh model."""

    def make(
        ordinal: int,
        rewards: Sequence[float] = (1, 0, 0, 1),
        *,
        seed: int = 0,
        failed: Sequence[int] = (),
        masked: float = 0.0,
        lengths: Sequence[int] | None = None,
        prompt_length: int | None = None,
    ) -> Group:
        rng = np.random.default_rng([seed, ordinal])
        size = len(rewards)
        counts = rng.integers(1, 17, size) if lengths is None else np.array(lengths)
        total = int(counts.sum())
        return Group(
            job="job_1",
            draw=Draw(ordinal),
            attempt="a",
            epoch=0,
            prompt_ids=rng.integers(0, VOCAB, prompt_length or rng.integers(2, 9)).astype(np.int32),
            token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
            cu_seqlens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            logprobs=(-np.log(VOCAB) + 0.3 * rng.standard_normal(total)).astype(np.float32),
            mask=(rng.random(total) >= masked).astype(np.uint8),
            rewards=np.array(rewards, np.float32),
            failed=np.isin(np.arange(size), failed),
            finish=rng.integers(0, 2, size).astype(np.uint8),
            spans=np.array([[i, 0, 0, n] for i, n in enumerate(counts)], np.int32).reshape(-1, 4),
            temperature=0.7,
        )

    return make


@pytest.fixture
def ragged_batches(make_group: Callable[..., Group]) -> Callable[[int], list[list[Group]]]:
    """Return a function that builds batches of ragged groups: failures, masked tokens, and uneven work for ranks."""

    def make(number: int) -> list[list[Group]]:
        return [
            [
                make_group(10 * update + i, [1, 0, 0.5, i % 2], masked=0.2 * (i % 2), failed=[i] if i < 2 else [])
                for i in range(6)
            ]
            for update in range(number)
        ]

    return make


@pytest.fixture
def batch(make_group: Callable[..., Group]) -> list[Group]:
    """Return four groups: mixed rewards, a failed trajectory, masked tokens, and one without signal."""
    return [
        make_group(0, [1, 0, 0, 1]),
        make_group(1, [0, 2, 0.5, 0], failed=[1]),
        make_group(2, [0, 1, 0, 0], masked=0.3),
        make_group(3, [1, 1, 1, 1]),
    ]
