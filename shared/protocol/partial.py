"""Unfinished completions as frames in the stream PARTIAL, one frame per completion, with int32 tokens and float32
log-probs as in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.frame import decode_frame, encode_frame
from penstock.shared.protocol.generation import Sample, Sampling, Span

__all__ = ["decode_partial", "encode_partial", "recipe_of"]

_FINISHES = ("stop", "length", "abort")
_DTYPES = {"token_ids": "int32", "logprobs": "float32"}


def recipe_of(prompt_ids: Sequence[int], asked: Sequence[tuple[Sampling, int]]) -> str:
    """Return a digest of the requests that a ticket sends to an engine: equal digests mean equal requests, seeds
    included.

    ``asked`` has the sampling parameters and the number of completions of each request.
    """
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((list(prompt_ids), list(asked))))


def encode_partial(sample: Sample, recipe: str) -> bytes:
    """Encode an unfinished completion of the ticket whose requests have the digest ``recipe``.

    A completion with ``finish`` 'abort' is unfinished, and another worker can continue it.
    """
    tree = {
        "schema": SCHEMA,
        "kind": "Partial",
        "recipe": recipe,
        "finish": sample.finish,
        "spans": [[span.version, span.start, span.end, span.weights] for span in sample.spans],
        "token_ids": np.asarray(sample.token_ids, np.int32),
        "logprobs": np.asarray(sample.logprobs, np.float32),
    }
    return b"".join(encode_frame(tree))


def decode_partial(data: bytes, recipe: str) -> Sample:
    """Inverse of ``encode_partial``.

    Raises:
        ProtocolError: another schema or recipe, or arrays and spans that do not fit together.
    """
    tree = decode_frame(data)
    if not isinstance(tree, dict) or tree.get("kind") != "Partial" or tree.get("schema") != SCHEMA:
        raise ProtocolError("no completion in progress of a known schema")
    if tree.get("recipe") != recipe:
        raise ProtocolError("a completion of another prompt or with other sampling")
    try:
        spans = msgspec.convert(tree["spans"], list[Span])
        sample = Sample(
            token_ids=_list(tree, "token_ids"), logprobs=_list(tree, "logprobs"), finish=tree["finish"], spans=spans
        )  # fmt: skip
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise ProtocolError(f"a completion in progress lacks a part: {error!r}") from None
    _check(sample)
    return sample


def _list(tree: dict[str, Any], name: str) -> list[Any]:
    array: NDArray[Any] = tree[name]
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.name != _DTYPES[name]:
        raise ValueError(f"{name} must be {_DTYPES[name]} in one dimension")
    values: list[Any] = array.tolist()
    return values


def _check(sample: Sample) -> None:
    num, end = len(sample.token_ids), 0
    for span in sample.spans:
        if span.start != end or span.end <= end:
            raise ProtocolError("version spans of a completion in progress do not follow each other")
        end = span.end
    if not num or len(sample.logprobs) != num or end != num or sample.finish not in _FINISHES:
        raise ProtocolError(f"{num} tokens in progress, {len(sample.logprobs)} log-probs, spans of {end} tokens")
