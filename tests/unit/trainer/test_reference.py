"""A reference policy from a directory: used as it is, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]


def saved(path: Path, job: JobConfig, changes: dict[str, Any], *, seed: int) -> None:
    """Save a model of another ``seed``, with ``changes`` to its configuration, in ``path``."""
    model_config = ModelConfig.model_validate({**job.model.model_dump(), **changes})
    tokenizer = build_tokenizer(model_config)
    build_model(model_config, len(tokenizer), seed=seed).save_pretrained(path)
    tokenizer.save_pretrained(path)


def test_the_named_model_is_the_reference(tmp_path: Path, make_config: Config, batch: list[Group]) -> None:
    saved(tmp_path, make_config(), {}, seed=99)
    config = make_config(algorithm={"kl": {"coef": 0.1, "reference": str(tmp_path)}})
    learner, plain = Learner(config), Learner(make_config())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(learner.weights(), plain.weights(), strict=True))
    learner.warm_start([])
    reference = learner.state().models["policy"].reference
    expected = dict(build_model(ModelConfig(path=str(tmp_path)), 54, seed=0).named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in reference.items())
    assert learner.update(BatchShard.whole(batch), update_index=0)["policy/kl_ref"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"characters": "9876543210+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"}, "another vocabulary: 10 tokens"),
        ({"characters": "0123456789+-*/=?"}, r"another vocabulary: 'model\.embed_tokens\.weight' is \[20, 32\]"),
        ({"config": {"hidden_size": 32, "intermediate_size": 32, "num_layers": 2}}, "'model.layers.*down_proj"),
    ],
    ids=["other-ids", "fewer-tokens", "other-width"],
)
def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, make_config: Config, changes: dict[str, Any], message: str
) -> None:
    saved(tmp_path, make_config(), changes, seed=1)
    with pytest.raises(ConfigError, match=message):
        Learner(make_config(algorithm={"kl": {"coef": 0.1, "reference": str(tmp_path)}}))


def test_a_tokenizer_with_other_token_ids_is_refused(tmp_path: Path, make_config: Config) -> None:
    saved(tmp_path, make_config(), {}, seed=1)
    config = make_config()
    model = ModelConfig(
        path=str(tmp_path), tokenizer="char", characters="9876543210+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"
    )
    with pytest.raises(ConfigError, match=r"model\.tokenizer is 'char'.*another vocabulary: 10 tokens"):
        Learner(config.model_copy(update={"model": model}))
