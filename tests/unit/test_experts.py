"""Mixtures of experts: the grouped computation against a token at a time, routing, counting, and the balancing loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from penstock.services.rollout.engines.remote import checkpoint_tensors
from penstock.shared.algorithms.load_balancing import load_balancing_loss
from penstock.shared.models import decoder, hidden_states, pack, selected_logprobs
from penstock.shared.models.architecture import plan_of
from penstock.shared.models.attention import CausalBlocks
from penstock.shared.models.experts import Recorder, RouterLoad, Routes, Sparse

E, K, N = 6, 2, 2
SEQUENCES = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=29, hidden_size=16, num_hidden_layers=N, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=E, num_experts_per_tok=K, moe_intermediate_size=12, norm_topk_prob=True, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def layers(model: PreTrainedModel) -> tuple[Sparse, ...]:
    plan = plan_of(model)
    assert plan is not None
    return plan.sparse


def recorded(model: PreTrainedModel) -> Tensor:
    """Return the experts that the router chooses by itself, int64 [T, N, K]."""
    recorder = Recorder()
    tokens = pack(SEQUENCES)
    plan = plan_of(model)
    assert plan is not None
    blocks = CausalBlocks.of(tokens)
    rope = decoder.rope_at(plan, tokens.position_ids_T)
    decoder.decode(plan, tokens.token_ids_T, rope, lambda _, q, k, v: blocks.attend(q, k, v), recorder)
    return recorder.table()


def test_split_experts_are_those_that_transformers_writes(model: PreTrainedModel, tmp_path: Path) -> None:
    """Servers load checkpoint files: names and bits must be those of a checkpoint of the same model."""
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint_tensors(model.state_dict().items()))
    assert found.keys() == written.keys()
    assert sum(".experts." in name for name in found) == N * E * 3
    for name, tensor in written.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_experts_computed_token_by_token(model: PreTrainedModel, dtype: torch.dtype) -> None:
    layer = layers(model)[0]
    h_TD = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    expected = []
    for h_D in h_TD:
        probs_E = torch.softmax(layer.router.weight @ h_D, -1)
        weights_K, experts_K = probs_E.topk(K)
        weights_K = weights_K / weights_K.sum()
        gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
        outs = []
        for expert in experts_K.tolist():
            gate, up = (gate_up[expert] @ h_D).chunk(2)
            outs.append(down[expert] @ (F.silu(gate) * up))
        expected.append((weights_K[:, None] * torch.stack(outs)).sum(0))
    narrow = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    narrow.load_state_dict(model.state_dict())
    found = layers(narrow)[0](h_TD.to(dtype), None).float()
    bound = 1e-5 if dtype == torch.float32 else 0.05  # CPUs differ in the order of sums
    close = ((found - torch.stack(expected)).abs() < bound).all(-1)
    assert close.float().mean() > (0.999 if dtype == torch.float32 else 0.9), (
        "bfloat16 may choose other experts at a tie"
    )


def test_one_token_and_idle_experts(model: PreTrainedModel) -> None:
    layer = layers(model)[1]
    h_TD = torch.randn(1, 16).requires_grad_()
    layer(h_TD, None).sum().backward()
    assert h_TD.grad is not None
    gradient = layer.experts.down_proj.grad
    assert gradient is not None
    assert int((gradient.flatten(1).abs().sum(1) > 0).sum()) == K
    model.zero_grad()


def test_a_replayed_table_replaces_the_choice_of_the_router(model: PreTrainedModel) -> None:
    tokens = pack(SEQUENCES)
    table_TNK = recorded(model)
    with torch.no_grad():
        own = hidden_states(model, tokens)
        replayed = hidden_states(model, tokens, Routes(table_TNK.to(torch.uint8)))
        other = hidden_states(model, tokens, Routes((table_TNK + 1) % E))
    assert torch.equal(own, replayed)
    assert not torch.allclose(own, other, atol=1e-3)


def test_a_replayed_table_follows_its_tokens_into_blocks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = pack(SEQUENCES)
    table_TNK = (recorded(model) + torch.arange(tokens.num_tokens)[:, None, None]) % E
    whole, parts = RouterLoad(), RouterLoad()
    with torch.no_grad():
        expected = hidden_states(model, tokens, Routes(table_TNK, whole))
        monkeypatch.setattr(decoder, "BLOCK_TOKENS", 5)
        found = hidden_states(model, tokens, Routes(table_TNK, parts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert whole.num_tokens == parts.num_tokens == tokens.num_tokens
    for layer in range(N):
        assert torch.equal(whole.chosen[layer], parts.chosen[layer])
        torch.testing.assert_close(whole.probs[layer], parts.probs[layer])
        torch.testing.assert_close(whole.entropy[layer], parts.entropy[layer])


def test_replay_reaches_the_router_with_its_gradient(model: PreTrainedModel) -> None:
    tokens = pack(SEQUENCES)
    table_TNK = (recorded(model) + 1) % E
    select, targets = torch.tensor([0, 1, 2]), torch.tensor([4, 5, 6])
    logprobs, _ = selected_logprobs(
        model, tokens, select, targets, temperature=1.0, entropy=False, routes=Routes(table_TNK)
    )
    (gradient,) = torch.autograd.grad(logprobs.sum(), layers(model)[0].router.weight)
    assert float(gradient.abs().max()) > 0


def test_an_even_load_has_loss_one_and_a_lopsided_one_more() -> None:
    even = load_balancing_loss(torch.full((E,), 30.0 / E), torch.full((E,), 60 // E), num_tokens=30)
    assert even.item() == pytest.approx(1.0)
    lopsided = torch.tensor([30.0, 0, 0, 0, 0, 0])
    assert load_balancing_loss(lopsided, lopsided, num_tokens=30).item() == pytest.approx(E)


def test_the_balancing_loss_is_that_of_transformers_divided_by_experts_per_token() -> None:
    logits_TE = torch.randn(40, E, generator=torch.Generator().manual_seed(3))
    probs_TE = torch.softmax(logits_TE, -1)
    load = RouterLoad()
    load.add(0, probs_TE.topk(K).indices, probs_TE)
    found = load_balancing_loss(load.probs[0], load.chosen[0], num_tokens=40)
    assert found.item() == pytest.approx(float(load_balancing_loss_func((logits_TE,), E, K)) / K, rel=1e-5)


def test_losses_of_microbatches_add_up_only_with_the_counts_of_the_batch() -> None:
    probs_TE = torch.softmax(torch.randn(40, E, generator=torch.Generator().manual_seed(4)), -1)

    def loss(probs: Tensor, counted: Tensor) -> float:
        chosen_E = torch.bincount(counted.topk(K).indices.flatten(), minlength=E)
        return load_balancing_loss(probs.sum(0), chosen_E, num_tokens=40).item()

    whole, parts = loss(probs_TE, probs_TE), (probs_TE[:13], probs_TE[13:])
    assert sum(loss(part, probs_TE) for part in parts) == pytest.approx(whole, rel=1e-6)
    assert sum(loss(part, part) for part in parts) != pytest.approx(whole, rel=1e-4)


def test_the_balancing_gradient_takes_probability_from_the_busiest_expert() -> None:
    logits_TE = torch.randn(40, E, generator=torch.Generator().manual_seed(5)).requires_grad_()
    probs_TE = torch.softmax(logits_TE, -1)
    chosen_E = torch.bincount(probs_TE.topk(K).indices.flatten(), minlength=E)
    load_balancing_loss(probs_TE.sum(0), chosen_E, num_tokens=40).backward()
    assert logits_TE.grad is not None
    assert float(logits_TE.grad[:, chosen_E.argmax()].mean()) > 0 > float(logits_TE.grad[:, chosen_E.argmin()].mean())
