"""Hugging Face weights that are cut, fused and joined again have the same bits, for all shapes and ranks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from penstock.services.trainer.backends.megatron.conversion import (
    cut,
    dealt,
    fuse,
    joined,
    mapping_of,
    shape_on_rank,
    split,
)
from penstock.shared.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


def shapes_of(  # the names of Llama, Qwen2 and Qwen3 in the order of their modules
    *,
    layers: int,
    kv: int,
    ratio: int,
    d: int,
    width: int,
    mlp: int,
    vocab: int,
    bias: bool,
    norms: bool,
    head: str,
    experts: int = 0,
) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, width)}
    for n in range(layers):
        for name, heads in (("q", kv * ratio), ("k", kv), ("v", kv)):
            shapes[f"model.layers.{n}.self_attn.{name}_proj.weight"] = (heads * d, width)
            if bias:
                shapes[f"model.layers.{n}.self_attn.{name}_proj.bias"] = (heads * d,)
        shapes[f"model.layers.{n}.self_attn.o_proj.weight"] = (width, kv * ratio * d)
        if norms:
            shapes |= {f"model.layers.{n}.self_attn.{name}_norm.weight": (d,) for name in "qk"}
        if experts:
            shapes[f"model.layers.{n}.mlp.gate.weight"] = (experts, width)
            shapes[f"model.layers.{n}.mlp.experts.gate_up_proj"] = (experts, 2 * mlp, width)
            shapes[f"model.layers.{n}.mlp.experts.down_proj"] = (experts, width, mlp)
        else:
            shapes |= {f"model.layers.{n}.mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
            shapes[f"model.layers.{n}.mlp.down_proj.weight"] = (width, mlp)
        shapes |= {f"model.layers.{n}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (width,)
    return shapes | {"untied": {"lm_head.weight": (vocab, width)}, "critic": {"score.weight": (1, width)}}.get(head, {})


def models(tensor_parallel: int) -> st.SearchStrategy[tuple[Shapes, int]]:
    return st.fixed_dictionaries(
        {
            "layers": st.integers(1, 2),
            "kv": st.integers(1, 3).map(lambda n: n * tensor_parallel),
            "ratio": st.integers(1, 3),
            "d": st.integers(1, 4).map(lambda n: 2 * n),
            "width": st.integers(1, 9),
            "mlp": st.integers(1, 5).map(lambda n: n * tensor_parallel),
            "vocab": st.integers(1, 9).map(lambda n: n + tensor_parallel * (tensor_parallel - 1)),
            "bias": st.booleans(),
            "norms": st.booleans(),
            "experts": st.sampled_from([0, 3]),
            "head": st.sampled_from(["tied", "untied", "critic"]),
        }
    ).map(lambda values: (shapes_of(**values), values["kv"]))


def whole_tensors(shapes: Shapes) -> dict[str, Tensor]:
    """Return tensors of these shapes, in which every element is a different number."""
    total, tensors = 0, {}
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(total, total + size, dtype=torch.float64).view(shape)
        total += size
    return tensors


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4]))
def test_weights_survive_cutting_fusing_and_joining(data: st.DataObject, size: int) -> None:
    shapes, kv = data.draw(models(size))
    whole = whole_tensors(shapes)
    again: dict[str, Tensor] = {}
    has_experts = any(".experts." in name for name in shapes)
    over = data.draw(st.sampled_from([1, 3])) if has_experts else 1  # expert-parallel ranks; there are 3 experts
    for parameter in mapping_of(shapes, num_kv_heads=kv, tensor_parallel=size, expert_parallel=over):
        assert parameter.is_dealt == (over > 1 and ".experts." in parameter.name)
        groups = []
        for place in range(over if parameter.is_dealt else 1):
            ranks = []
            for rank in range(size):
                pieces = [dealt(whole[piece.name], piece, rank=place) for piece in parameter.pieces]
                parts = [cut(t, piece, rank=rank, size=size) for t, piece in zip(pieces, parameter.pieces, strict=True)]
                fused = fuse(parts, parameter)
                assert fused.shape == shape_on_rank(parameter, size=size)
                ranks.append(split(fused, parameter, rank=rank, size=size))
            columns = zip(*ranks, strict=True)
            groups.append([joined(column, piece) for piece, column in zip(parameter.pieces, columns, strict=True)])
        for piece, parts in zip(parameter.pieces, zip(*groups, strict=True), strict=True):
            again[piece.name] = torch.cat(parts)
    assert again.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(again[name], tensor), name


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([2, 3]))
def test_ranks_hold_equal_shapes_and_every_row_once(data: st.DataObject, size: int) -> None:
    shapes, kv = data.draw(models(size))
    whole = whole_tensors(shapes)
    for parameter in mapping_of(shapes, num_kv_heads=kv, tensor_parallel=size):
        ranks = [
            fuse([cut(whole[piece.name], piece, rank=rank, size=size) for piece in parameter.pieces], parameter)
            for rank in range(size)
        ]
        assert len({rank.shape for rank in ranks}) == 1, "all_gather needs equal shapes"
        expected = sum(whole[piece.name].numel() for piece in parameter.pieces)
        seen = torch.cat([rank.flatten() for rank in ranks]).unique()
        assert len(seen[seen > 0]) == expected - int(parameter.name.startswith("embedding")), "number 0 is a weight too"
        if not parameter.is_cut:
            assert all(torch.equal(ranks[0], rank) for rank in ranks)


def test_stages_are_equal_runs_of_layers() -> None:
    shapes = shapes_of(layers=4, kv=1, ratio=1, d=2, width=2, mlp=2, vocab=4, bias=False, norms=True, head="untied")
    parameters = mapping_of(shapes, num_kv_heads=1, tensor_parallel=1, pipeline_parallel=2)
    stages = {parameter.name: parameter.stage for parameter in parameters}
    assert [stages[f"decoder.layers.{layer}.input_layernorm.weight"] for layer in range(4)] == [0, 0, 1, 1]
    ends = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
    assert [stages[name] for name in ends] == [0, 1, 1]


def test_heads_are_interleaved_by_query_group() -> None:
    """The rows are [q q k v] of the first group, then of the second, as megatron-core's SelfAttention expects."""
    shapes = shapes_of(
        layers=1, kv=2, ratio=2, d=2, width=1, mlp=2, vocab=4, bias=False, norms=False, head="tied"
    )  # fmt: skip
    (qkv,) = [p for p in mapping_of(shapes, num_kv_heads=2, tensor_parallel=1) if p.name.endswith("linear_qkv.weight")]
    q, k, v = (torch.arange(n).view(-1, 1) + base for n, base in ((8, 100), (4, 200), (4, 300)))
    fused = fuse([q, k, v], qkv)[:, 0].tolist()
    assert fused == [100, 101, 102, 103, 200, 201, 300, 301, 104, 105, 106, 107, 202, 203, 302, 303]


def test_the_parts_of_two_ranks_are_halves_of_the_part_of_one() -> None:
    shapes = shapes_of(layers=1, kv=2, ratio=2, d=4, width=3, mlp=4, vocab=6, bias=True, norms=True, head="untied")
    whole = whole_tensors(shapes)
    one = {p.name: p for p in mapping_of(shapes, num_kv_heads=2, tensor_parallel=1)}
    for parameter in mapping_of(shapes, num_kv_heads=2, tensor_parallel=2):
        if "linear_qkv" in parameter.name or "word_embeddings" in parameter.name:
            whole_parts = [whole[piece.name] for piece in parameter.pieces]
            halves = [
                fuse(
                    [cut(t, p, rank=rank, size=2) for t, p in zip(whole_parts, parameter.pieces, strict=True)],
                    parameter,
                )
                for rank in range(2)
            ]
            assert torch.equal(torch.cat(halves), fuse(whole_parts, one[parameter.name]))


BASE: dict[str, Any] = {
    "layers": 1, "kv": 2, "ratio": 2, "d": 4, "width": 4, "mlp": 6, "vocab": 9, "bias": False, "norms": True,
    "head": "tied",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "extra", "tensor_parallel", "message"),
    [
        ({}, {}, 4, "does not divide the 2 key/value heads"),
        ({"mlp": 5}, {}, 2, "does not divide the 5 columns"),
        ({"mlp": 5, "experts": 2}, {}, 2, "does not divide the 5 columns"),
        ({"vocab": 3, "kv": 4, "mlp": 8}, {}, 4, "vocabulary of 3 is too small"),
        ({}, {"model.layers.0.self_attn.o_proj.bias": (4,)}, 1, "tensor 'model.layers.0.self_attn.o_proj.bias'"),
        ({}, {"model.layers.0.mlp.shared_expert.down_proj": (2, 4, 6)}, 1, "no place"),
        ({}, {"transformer.wte.weight": (4, 4)}, 1, "no place"),
    ],
)  # fmt: skip
def test_unfit_models_are_refused(change: dict[str, Any], extra: Shapes, tensor_parallel: int, message: str) -> None:
    shapes = shapes_of(**{**BASE, **change}) | extra
    kv = {**BASE, **change}["kv"]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        mapping_of(shapes, num_kv_heads=kv, tensor_parallel=tensor_parallel)


@pytest.mark.parametrize(
    ("experts", "sizes", "message"),
    [
        (0, {"pipeline_parallel": 2}, "pipeline_parallel 2 does not divide the 3 layers"),
        (3, {"expert_parallel": 2}, "expert_parallel 2 does not divide the 3 experts"),
        (0, {"expert_parallel": 2}, "this model has no experts"),
    ],
)
def test_uneven_layers_and_experts_are_refused(experts: int, sizes: dict[str, int], message: str) -> None:
    shapes = shapes_of(**{**BASE, "layers": 3, "experts": experts})
    with pytest.raises(ConfigError, match=message):
        mapping_of(shapes, num_kv_heads=2, tensor_parallel=1, **sizes)
