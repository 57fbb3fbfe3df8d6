"""The GRPO update against an independent loop over single sequences, and what must not change its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.backends.local import open_local
from penstock.services.trainer.batch.facts import gather_facts
from penstock.services.trainer.batch.packing import columns_of, microbatches
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.optimizer import decayed_names
from penstock.services.trainer.ranks.collective import Alone
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_model
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def update(learner: Learner, groups: list[Group], *, update_index: int = 0) -> dict[str, float]:
    return learner.update(BatchShard.whole(groups), update_index=update_index)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], *, atol: float) -> None:
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def naive_update(config: JobConfig, groups: list[Group]) -> tuple[dict[str, Tensor], list[float]]:
    """Train sequence by sequence, as the GRPO paper says, in plain torch with its AdamW; return weights and losses."""
    algorithm, optimizer = config.algorithm, config.optimizer
    kl_coef = algorithm.kl.coef if algorithm.kl is not None else 0.0
    model = build_model(config.model, 54, seed=config.seed)
    reference = build_model(config.model, 54, seed=config.seed)
    names = decayed_names(model)
    decayed = [p for n, p in model.named_parameters() if n in names]
    others = [p for n, p in model.named_parameters() if n not in names]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, foreach=False,
    )  # fmt: skip

    def logits(policy: Any, group: Group, i: int) -> Tensor:
        a, b = group.cu_seqlens[i : i + 2]
        ids = np.concatenate([group.prompt_ids, group.token_ids[a:b]]).astype(np.int64)
        out = policy(input_ids=torch.from_numpy(ids)[None]).logits[0, len(group.prompt_ids) - 1 : -1]
        return out.float() / config.sampling.temperature

    losses = []
    size = len(groups) // config.train.minibatches
    for _ in range(config.train.epochs):
        for part in (groups[i : i + size] for i in range(0, len(groups), size)):
            sums, lengths = [], []
            for group in part:
                valid = np.flatnonzero(~group.failed)
                rewards = group.rewards[valid].astype(np.float64)
                centred = rewards - rewards.mean()
                scaled = centred / (rewards.std(ddof=1) + 1e-6) if algorithm.scale_by_std else centred
                for i, advantage in zip(valid, scaled, strict=True):
                    a, b = group.cu_seqlens[i : i + 2]
                    chosen = torch.from_numpy(group.mask[a:b] != 0)
                    targets = torch.from_numpy(group.token_ids[a:b].astype(np.int64))
                    z = logits(model, group, i)
                    distribution = torch.distributions.Categorical(logits=z)
                    logp = distribution.log_prob(targets)
                    ratio = (logp - torch.from_numpy(group.logprobs[a:b])).exp()
                    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                    token = -torch.minimum(ratio * advantage, clipped * advantage)
                    with torch.no_grad():
                        log_ref = torch.distributions.Categorical(logits=logits(reference, group, i)).log_prob(targets)
                    token = token + kl_coef * ((log_ref - logp).exp() - (log_ref - logp) - 1)
                    token = token - algorithm.entropy_coef * distribution.entropy()
                    sums.append(token[chosen].sum())
                    lengths.append(int(chosen.sum()))
            counted = sum(n > 0 for n in lengths)
            if algorithm.aggregation == "token_mean":
                loss = sum(sums) / sum(lengths)
            elif algorithm.aggregation == "sequence_mean":
                loss = sum(s / n for s, n in zip(sums, lengths, strict=True) if n) / counted
            else:
                loss = sum(sums) / counted / config.sampling.max_new_tokens
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
            adam.step()
            losses.append(loss.item())
    return {n: p.detach() for n, p in model.named_parameters()}, losses


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"epochs": 2, "minibatches": 2}},
        {"algorithm": {"aggregation": "sequence_mean", "scale_by_std": False, "clip_high": 0.05}},
        {"algorithm": {"aggregation": "constant", "kl": {"coef": 0.3}, "entropy_coef": 0.2}, "train": {"epochs": 3}},
        {"algorithm": {"kl": {"coef": 0.3}}, "train": {"minibatches": 4, "max_tokens_per_microbatch": 32}},
        {"model": {"config": {"arch": "llama", "hidden_size": 32, "num_layers": 1, "num_kv_heads": 4}}},
    ],
    ids=["plain", "epochs-minibatches", "sequence-mean", "constant-kl-entropy", "kl-microbatches", "llama"],
)
def test_update_matches_the_naive_loop(make_config: Config, batch: list[Group], sections: dict[str, Any]) -> None:
    config = make_config(optimizer={"eps": 1e-3}, **sections)
    expected, losses = naive_update(config, batch)
    learner = Learner(config)
    metrics = update(learner, batch)
    assert metrics["loss/total"] == pytest.approx(np.mean(losses), abs=2e-6)
    assert metrics["optimizer/steps"] == len(losses)
    assert_same(weights_of(learner), expected, atol=2e-5)


def test_same_state_and_batch_give_the_same_bytes(make_config: Config, batch: list[Group]) -> None:
    config = make_config(train={"epochs": 2, "minibatches": 2}, algorithm={"kl": {"coef": 0.1}})
    learner = Learner(config)
    start = learner.state()
    results = []
    for _ in range(2):
        learner.load_state(start)
        metrics = update(learner, batch, update_index=3)
        timeless = {k: v for k, v in metrics.items() if not k.startswith(("update_s/", "speed/"))}
        results.append((weights_of(learner), timeless))
    again = Learner(config)
    update(again, batch, update_index=3)
    assert all(torch.equal(tensor, results[1][0][name]) for name, tensor in results[0][0].items())
    assert all(torch.equal(tensor, results[0][0][name]) for name, tensor in again.weights())
    assert results[0][1] == results[1][1]


def gradient(config: JobConfig, groups: list[Group]) -> dict[str, Tensor]:
    """Return the gradient of the whole batch, taken from the first moment after one unclipped step."""
    learner = Learner(config)
    update(learner, groups)
    moments = learner.state().models["policy"].optimizer
    return {n.removeprefix("exp_avg."): t * 10 for n, t in moments.items() if n.startswith("exp_avg.")}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_cut_into_microbatches_changes_no_gradient(
    make_config: Config, batch: list[Group], aggregation: str
) -> None:
    sections = {"algorithm": {"aggregation": aggregation, "kl": {"coef": 0.1}}, "optimizer": {"max_grad_norm": 1e9}}
    whole = gradient(make_config(**sections), batch)
    for limit in (16, 50, 120):
        cut = gradient(make_config(train={"max_tokens_per_microbatch": limit}, **sections), batch)
        assert_same(cut, whole, atol=1e-6)


def test_leaving_out_sequences_without_signal_changes_no_gradient(make_config: Config, batch: list[Group]) -> None:
    """A vanishing entropy coefficient turns the shortcut off and adds less than the tolerance."""
    optimizer = {"max_grad_norm": 1e9}
    short = make_config(optimizer=optimizer)
    full = make_config(optimizer=optimizer, algorithm={"entropy_coef": 1e-12})
    assert_same(gradient(short, batch), gradient(full, batch), atol=1e-6)
    short_metrics = update(Learner(short), batch)
    full_metrics = update(Learner(full), batch)
    assert short_metrics["tokens/forward"] < full_metrics["tokens/forward"] == full_metrics["tokens/scored"]
    assert short_metrics["loss/policy"] == pytest.approx(full_metrics["loss/policy"], abs=1e-6)


def test_a_batch_without_any_signal_steps_as_a_zero_gradient_does(
    make_config: Config, make_group: Callable[..., Group], batch: list[Group]
) -> None:
    flat = [make_group(i, [1, 1, 1, 1]) for i in range(4)]
    results = []
    for entropy_coef in (0.0, 1e-30):
        learner = Learner(make_config(algorithm={"entropy_coef": entropy_coef}, optimizer={"eps": 1e-3}))
        update(learner, batch)
        before = weights_of(learner)
        metrics = update(learner, flat, update_index=1)
        results.append(weights_of(learner))
        assert any(not torch.equal(before[n], t) for n, t in results[-1].items()), "momentum goes on"
    assert_same(results[0], results[1], atol=1e-6)
    assert metrics["groups/no_signal"] == 4
    learner = Learner(make_config())
    metrics = update(learner, flat)
    assert metrics["tokens/forward"] == 0
    assert metrics["optimizer/grad_norm"] == 0
    assert "mismatch/kl" not in metrics


def test_metrics_say_what_happened(make_config: Config, batch: list[Group]) -> None:
    metrics = update(Learner(make_config()), batch)
    rewards = np.concatenate([g.rewards[~g.failed] for g in batch])
    assert metrics["reward/mean"] == pytest.approx(rewards.mean())
    assert metrics["reward/std"] == pytest.approx(rewards.std())
    assert (metrics["reward/min"], metrics["reward/max"]) == (0, 1)
    assert (metrics["groups/count"], metrics["groups/no_signal"]) == (4, 1)
    assert (metrics["sequences/count"], metrics["sequences/failed"]) == (15, 1)
    assert metrics["optimizer/lr"] == 1e-2
    assert metrics["optimizer/grad_norm"] > 0
    assert metrics["mismatch/kl"] > 0
    assert metrics["mismatch/kl"] == pytest.approx(metrics["policy/approx_kl"])
    assert metrics["policy/ratio_max"] > 1.2
    assert metrics["policy/clip_low"] > 0
    assert metrics["policy/clip_high"] > 0
    assert all(np.isfinite(v) for v in metrics.values())


def test_on_policy_samples_show_no_mismatch_and_no_clip(make_config: Config, batch: list[Group]) -> None:
    """The trainer itself computes the behaviour log-probs, so the ratio is 1 on every token."""
    config = make_config()
    sampler = open_local(config, "policy", "cpu")
    groups = []
    for group in batch:
        columns = columns_of([replace(group, failed=np.zeros(4, bool), mask=np.ones_like(group.mask))])
        logprobs = np.zeros_like(group.logprobs)
        for micro in microbatches(columns, np.arange(4), 10_000):
            values = sampler.score(micro)
            for row in range(4):
                a, b = group.cu_seqlens[row : row + 2]
                logprobs[a:b] = values[micro.rows_M == row].numpy()
        groups.append(replace(group, logprobs=logprobs))
    metrics = update(Learner(config), groups)
    assert metrics["mismatch/logprob"] < 1e-6
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == 0
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)


def test_repeated_updates_raise_the_probability_of_what_is_rewarded(
    make_config: Config, make_group: Callable[..., Group]
) -> None:
    config = make_config(optimizer={"learning_rate": 3e-3})
    learner = Learner(config)
    model = build_model(config.model, 54, seed=0)
    group = make_group(0, [1, 0, 0, 0], lengths=[6, 6, 6, 6])

    @torch.no_grad()
    def rewarded() -> float:
        ids = torch.from_numpy(np.concatenate([group.prompt_ids, group.token_ids[:6]]).astype(np.int64))
        model.load_state_dict(dict(learner.weights()), strict=False)
        logits = model(input_ids=ids[None]).logits[0, -7:-1] / 0.7
        return float(torch.log_softmax(logits, -1).gather(-1, ids[-6:, None]).sum())

    before = rewarded()
    for i in range(5):
        update(learner, [group], update_index=i)
    assert rewarded() > before + 0.5


def test_minibatches_are_reshuffled_by_seed_and_update(make_config: Config, make_group: Callable[..., Group]) -> None:
    """With ``reshuffle``, minibatches follow from seed and update; without it they are the same in each update."""
    groups = [make_group(ordinal, (1, 0, 0.5, ordinal / 4)) for ordinal in range(4)]

    def trained(update_index: int = 3, **train: Any) -> dict[str, Tensor]:
        learner = Learner(make_config(train={"epochs": 3, "minibatches": 2, **train}))
        update(learner, groups, update_index=update_index)
        return weights_of(learner)

    def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
        return all(torch.equal(tensor, right[name]) for name, tensor in left.items())

    fixed, cut = trained(), trained(reshuffle=True)
    assert same(fixed, trained(reshuffle=False))
    assert same(cut, trained(reshuffle=True))
    assert not same(cut, fixed)
    assert not same(cut, trained(4, reshuffle=True))
    assert same(trained(epochs=1), trained(epochs=1)), "a single pass has nothing to shuffle"
    with pytest.raises(ConfigError, match="reshuffle: needs epochs > 1 and minibatches > 1"):
        make_config(train={"reshuffle": True, "minibatches": 2})


def test_a_reshuffled_pass_holds_every_group_once(make_config: Config, make_group: Callable[..., Group]) -> None:
    columns = columns_of([make_group(ordinal) for ordinal in range(6)])
    shard = BatchShard.whole([make_group(ordinal) for ordinal in range(6)])
    facts = gather_facts(columns, shard, Alone())
    assert facts.minibatch_of_rows(3).tolist() == [g // 2 for g in facts.group_B]
    order = np.array([5, 0, 3, 1, 4, 2])
    anew = facts.minibatch_of_rows(3, order)
    assert [sorted(set(facts.group_B[anew == i].tolist())) for i in range(3)] == [[0, 5], [1, 3], [2, 4]]


def test_staleness_is_separate_from_mismatch(make_config: Config, batch: list[Group]) -> None:
    """Tokens of the trained version count in ``mismatch/*``, tokens of older versions in ``lag/*``."""
    whole = update(Learner(make_config()), batch)
    newest = max(int(group.spans[:, 1].max()) for group in batch)

    def at(start_version: int) -> dict[str, float]:
        shard = replace(BatchShard.whole(batch), start_version=start_version)
        return Learner(make_config()).update(shard, update_index=0)

    fresh, stale = at(0), at(newest + 1)
    assert "lag/kl" not in fresh
    assert fresh["mismatch/kl"] == pytest.approx(whole["mismatch/kl"])
    assert "mismatch/kl" not in stale
    assert stale["lag/kl"] == pytest.approx(whole["mismatch/kl"])
    assert stale["lag/logprob"] == pytest.approx(whole["mismatch/logprob"])

    first = replace(batch[0], spans=batch[0].spans.copy())
    first.spans[:, 1] = newest + 1
    mixed = replace(BatchShard.whole([first, *batch[1:]]), start_version=newest + 1)
    both = Learner(make_config()).update(mixed, update_index=0)
    assert both["mismatch/kl"] > 0
    assert both["lag/kl"] > 0
    assert both["lag/kl"] != pytest.approx(whole["mismatch/kl"])
