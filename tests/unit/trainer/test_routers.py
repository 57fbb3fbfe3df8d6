"""Training a mixture of experts: the balancing loss is that of the whole minibatch, and tables are replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.services.trainer.batch.packing import columns_of
from penstock.services.trainer.checkpoint.state import save_checkpoint
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ProtocolError
from penstock.shared.models.experts import RouterLoad
from penstock.shared.protocol.trajectory import Group, decode_group, encode_group

LAYERS, E, K = 2, 6, 2
Config = Callable[..., JobConfig]


@pytest.fixture
def moe(make_config: Config) -> Callable[..., JobConfig]:
    """Return a function that builds a job with a mixture of experts from a ``moe`` section and other sections."""

    def make(moe: dict[str, Any] | None = None, **sections: Any) -> JobConfig:
        architecture = {
            "arch": "qwen3_moe", "hidden_size": 32, "intermediate_size": 32, "num_layers": LAYERS,
            "max_position_embeddings": 64, "experts": {"number": E, "per_token": K},
        }  # fmt: skip
        return make_config(model={"config": architecture, "tokenizer": "char", "moe": moe}, **sections)

    return make


def update(config: JobConfig, groups: Sequence[Group], steps: int = 1) -> tuple[Learner, list[dict[str, float]]]:
    learner = Learner(config)
    return learner, [learner.update(BatchShard.whole(groups), update_index=i) for i in range(steps)]


def with_tables(groups: Sequence[Group], dtype: str = "uint8") -> list[Group]:
    """Return ``groups`` with random router tables."""
    tabled = []
    for i, group in enumerate(groups):
        rng = np.random.default_rng(i)
        tokens = len(group.prompt_ids) + len(group.token_ids)
        table = rng.random((tokens, LAYERS, E)).argsort(-1)[..., :K].astype(dtype)
        tabled.append(replace(group, experts=table))
    return tabled


def largest_difference(a: Learner, b: Learner) -> float:
    pairs = zip(a.weights(), b.weights(), strict=True)
    return max(float((x - y).abs().max()) for (_, x), (_, y) in pairs)


def test_how_the_batch_is_cut_changes_nothing(moe: Any, batch: list[Group]) -> None:
    wanted = {"aux_loss_coef": 0.5}
    sgd = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 100.0, "eps": 1.0}}  # no division by small gradients
    whole, (metrics,) = update(moe(wanted, train={"max_tokens_per_microbatch": 10_000}, **sgd), batch)
    cut, (again,) = update(moe(wanted, train={"max_tokens_per_microbatch": 40}, **sgd), batch)
    without, _ = update(moe(None, train={"max_tokens_per_microbatch": 10_000}, **sgd), batch)
    assert largest_difference(whole, without) > 1e-5, "the loss has no effect: the test proves nothing"
    assert largest_difference(whole, cut) < 1e-6
    assert metrics["moe/aux_loss"] == pytest.approx(again["moe/aux_loss"], rel=1e-5)


def test_a_balancing_loss_per_microbatch_differs(moe: Any, batch: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove that the test above can fail: loads of each microbatch alone give other gradients."""
    from penstock.services.trainer.batch.routers import Routers

    wanted = {"aux_loss_coef": 0.5}
    sgd = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 100.0, "eps": 1.0}}
    whole, _ = update(moe(wanted, train={"max_tokens_per_microbatch": 10_000}, **sgd), batch)
    penalty = Routers.penalty

    def of_itself(routers: Routers, load: RouterLoad) -> torch.Tensor:
        aim = routers._aim_NE
        assert aim is not None
        routers._aim_NE = np.stack([load.chosen[n].numpy() for n in range(LAYERS)]).astype(np.float64)
        value = penalty(routers, load) * (routers._aim_NE[0].sum() / aim[0].sum())
        routers._aim_NE = aim
        return value

    monkeypatch.setattr(Routers, "penalty", of_itself)
    cut, _ = update(moe(wanted, train={"max_tokens_per_microbatch": 40}, **sgd), batch)
    assert largest_difference(whole, cut) > 1e-6


def test_training_balances_the_load(moe: Any, make_group: Callable[..., Group]) -> None:
    groups = [make_group(i, [1, 1, 1, 1]) for i in range(4)]  # no signal but that of the balancing loss
    config = moe({"aux_loss_coef": 1.0}, optimizer={"learning_rate": 3e-3, "weight_decay": 0.0})
    learner = Learner(config)
    router = learner._models["policy"]._model.model.layers[0].mlp.gate  # type: ignore[attr-defined]
    with torch.no_grad():
        router.weight[0] += 0.3 * router.weight[0].sign()
    metrics = [learner.update(BatchShard.whole(groups), update_index=i) for i in range(20)]
    assert metrics[-1]["moe/aux_loss"] < metrics[0]["moe/aux_loss"]
    assert metrics[-1]["moe/load_max"] < metrics[0]["moe/load_max"]
    assert metrics[0]["tokens/forward"] > 0, "groups without signal still balance"


def test_the_metrics_describe_the_load(moe: Any, batch: list[Group]) -> None:
    _, (metrics,) = update(moe(), batch)
    loads = [metrics[f"moe/load/{expert}"] for expert in range(E)]
    assert np.mean(loads) == pytest.approx(1.0)
    assert metrics["moe/load_min"] <= min(loads) <= max(loads) <= metrics["moe/load_max"]
    assert 0 < metrics["moe/router_entropy"] <= np.log(E) + 1e-6
    assert metrics["moe/aux_loss"] >= 0.9


def test_an_update_that_broke_off_is_not_counted(moe: Any, batch: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    learner, (expected,) = Learner(moe()), update(moe(), batch)[1]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(learner._policy, "step", lambda rate: rate / 0)
        learner.update(BatchShard.whole(batch[:1]), update_index=0)
    again = learner.update(BatchShard.whole(batch), update_index=0)
    assert again["moe/load_max"] == expected["moe/load_max"]
    assert again["moe/router_entropy"] == pytest.approx(expected["moe/router_entropy"])


def test_a_dense_model_reports_no_load(make_config: Config, batch: list[Group]) -> None:
    _, (metrics,) = update(make_config(), batch)
    assert not any(name.startswith("moe/") for name in metrics)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_tables_travel_with_their_tokens(batch: list[Group], dtype: str) -> None:
    groups = [decode_group(encode_group(group)[0]) for group in with_tables(batch, dtype)]
    assert all(np.array_equal(a.experts, b.experts) for a, b in zip(groups, with_tables(batch, dtype), strict=True))
    columns = columns_of(groups)
    from penstock.services.trainer.batch.packing import microbatches

    parts = microbatches(columns, np.arange(len(columns.group_B)), 60)
    assert len(parts) > 1
    tables = {}
    for group in groups:
        assert group.experts is not None
        num_prompt, ends = len(group.prompt_ids), group.cu_seqlens
        for i in range(group.num_trajectories):
            ids = (*group.prompt_ids.tolist(), *group.token_ids[ends[i] : ends[i + 1] - 1].tolist())
            own = group.experts[num_prompt + ends[i] : num_prompt + ends[i + 1] - 1]
            tables[ids] = np.concatenate([group.experts[:num_prompt], own])
    for part in parts:
        assert part.experts_TNK is not None
        bounds = np.cumsum([0, *part.tokens.lengths])
        for a, b in itertools.pairwise(bounds):
            ids = tuple(part.tokens.token_ids_T[a:b].tolist())
            assert np.array_equal(part.experts_TNK[a:b].numpy(), tables[ids])


def test_the_trainer_routes_by_replayed_tables(moe: Any, batch: list[Group]) -> None:
    tabled = with_tables(batch)
    config = moe({"router_replay": True})
    replayed, (metrics,) = update(config, tabled)
    own, _ = update(moe(), batch)
    assert largest_difference(replayed, own) > 1e-4
    trained = [g.experts for g in tabled]
    assert all(table is not None for table in trained)
    assert metrics["moe/load_max"] < 2, "random tables are nearly even"
    with pytest.raises(ProtocolError, match="did not record"):
        update(config, batch)


def test_the_load_of_a_table_is_counted_without_a_forward_pass(moe: Any, batch: list[Group]) -> None:
    tabled = with_tables(batch)
    wanted = {"router_replay": True, "aux_loss_coef": 0.5}
    sgd = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 100.0, "eps": 1.0}}
    whole, _ = update(moe(wanted, train={"max_tokens_per_microbatch": 10_000}, **sgd), tabled)
    cut, _ = update(moe(wanted, train={"max_tokens_per_microbatch": 40}, **sgd), tabled)
    assert largest_difference(whole, cut) < 1e-6


@pytest.mark.parametrize("wrong", ["layers", "expert", "missing"])
def test_tables_of_another_model_change_nothing(moe: Any, batch: list[Group], wrong: str) -> None:
    tabled = with_tables(batch)
    tables = [group.experts for group in tabled]
    assert tables[0] is not None
    if wrong == "layers":
        tabled = [replace(g, experts=t[:, :1]) for g, t in zip(tabled, tables, strict=True) if t is not None]
    elif wrong == "expert":
        tabled[0] = replace(tabled[0], experts=np.full_like(tables[0], E))
    else:
        tabled[0] = replace(tabled[0], experts=None)
    learner = Learner(moe({"router_replay": True}))
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    with pytest.raises(ProtocolError, match="router table"):
        learner.update(BatchShard.whole(tabled), update_index=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights())


def test_a_table_of_the_wrong_length_is_refused(batch: list[Group]) -> None:
    group = with_tables(batch)[0]
    assert group.experts is not None
    with pytest.raises(ProtocolError, match="router table"):
        encode_group(replace(group, experts=group.experts[:-1]))
    with pytest.raises(ProtocolError, match="uint8"):
        encode_group(replace(group, experts=group.experts.astype(np.int64)))


def test_the_table_counts_against_the_budget(moe: Any) -> None:
    plain, replaying = moe(), moe({"router_replay": True})
    tokens = plain.data.prompt.max_tokens + plain.algorithm.group_size * plain.sampling.max_new_tokens
    assert replaying.max_group_bytes - plain.max_group_bytes == tokens * LAYERS * K
    group_bytes = replaying.max_group_bytes
    budget = 2 * (replaying.train.max_lag + 2) * replaying.groups_per_batch * group_bytes
    moe({"router_replay": True}, limits={"byte_budget": budget})
    with pytest.raises(Exception, match="byte_budget"):
        moe({"router_replay": True}, limits={"byte_budget": budget - 2})


def test_a_checkpoint_of_experts_is_a_model_directory(moe: Any, batch: list[Group], tmp_path: Path) -> None:
    learner, _ = update(moe(), batch)
    path = save_checkpoint(tmp_path, "job_1", 1, learner.state(), {})
    ids = torch.tensor([[5, 9, 3, 17, 4]])
    own = learner._models["policy"]._model  # type: ignore[attr-defined]
    with torch.no_grad():
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(path)(ids).logits, own(ids).logits)
