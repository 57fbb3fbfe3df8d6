"""Constrained decoding: computes the allowed next tokens from the grammar of a constraint and the tokens so far.

llguidance (extra `structured`) compiles and matches the grammars. A matcher belongs to one completion and depends on
its output tokens only, so a weight update or a recomputed cache does not change which tokens it allows.

Shape legend: R = rows, V = vocabulary, W = bytes of a mask (8 tokens each, the first one in the lowest bit).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from penstock.shared.errors import ConstraintError, Unavailable
from penstock.shared.protocol.generation import Constraint, GenRequest
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["COMPILE_S", "MAX_KEPT", "Grammars", "Matcher", "allowed_tokens", "grammar_of"]

COMPILE_S = 5.0
"""Timeout in seconds for a request that waits for the compilation of its grammar."""
MAX_KEPT = 64
"""Number of compiled grammars in the cache; the least recently used one is evicted."""
AT_ONCE, MAX_PENDING = 2, 16
"""Maximum number of grammars compiled in parallel, and maximum number of those being compiled or queued."""
WHITESPACE = r"[ \n\t]{0,16}"
"""Regular expression for whitespace between JSON tokens. Bounded: a model could otherwise write only whitespace."""
MAX_SYMBOLS, START_FUEL = 100_000, 1_000_000
"""Limits on the size of a grammar, and on the work units that llguidance spends on its regular expressions (a million
take 20 ms). Larger grammars are rejected."""
STEP_FUEL, STEP_ITEMS = 100_000, 20_000
"""Limits on llguidance's work per token of a row: for regular expressions (7 ms) and for parsing (1 ms). An answer that
exceeds a limit ends, because its matcher would delay all other rows."""


def grammar_of(constraint: Constraint) -> str:
    """Return the constraint as a Lark grammar for llguidance: JSON, tool calls in the syntax of ``ToolCalls``, or
    either."""
    whole, rules = [], []
    if constraint.json_schema:
        whole.append("json")
        rules.append(f"json: %json {_schema(constraint.json_schema)}")
    if constraint.tools:
        whole.append("calls")
        rules.append("calls: call" + (r" (/\n{0,2}/ call)*" if constraint.parallel else ""))
        named = " | ".join(f"call_{place}" for place in range(len(constraint.tools)))
        rules.append(rf"call: /<tool_call>\n?/ ({named}) /\}}\n?<\/tool_call>/")
    for place, (name, schema) in enumerate(constraint.tools):
        written = name.replace(".", r"\.")
        rules.append(rf'call_{place}: /\{{[ ]?"name":[ ]?"{written}",[ ]?"arguments":[ ]?/ arguments_{place}')
        rules.append(f"arguments_{place}: %json {_schema(schema)}")
    return "\n".join([f"start: {' | '.join(whole)}", *rules])


def _schema(text: str) -> str:
    return json.dumps({**json.loads(text), "x-guidance": {"whitespace_pattern": WHITESPACE}})


class Followed(Protocol):
    """Methods of ``llguidance.LLMatcher`` that this module calls. The methods do not raise; errors set a permanent
    state."""

    def compute_bitmask(self) -> bytes:
        """Return a bit mask over the vocabulary: 1 for each token that may follow."""
        ...

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Append these tokens to the text; returns False if they may not follow."""
        ...

    def is_error(self) -> bool:
        """Return True if the matcher is in an error state and allows no further token."""
        ...

    def get_error(self) -> str:
        """Return the error message of llguidance."""
        ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """Return how many of these tokens, from the first on, may follow."""
        ...

    def deep_copy(self) -> Followed:
        """Return an independent copy in the same state."""
        ...


class Matcher:
    """Tracks the constraint of one completion. ``stuck``: no allowed token exists, or finding one exceeds a limit."""

    def __init__(self, followed: Followed, stop_ids: Sequence[int]) -> None:
        self._followed, self._stop_ids = followed, stop_ids
        self.num_consumed = 0
        """Number of output tokens consumed so far."""
        self.stuck = False

    def begin(self, token_ids: Sequence[int]) -> None:
        """Consume the part of the answer that the prompt already contains; ``num_consumed`` does not count it."""
        self.stuck = not self._followed.consume_tokens(list(token_ids))

    def consume(self, token_ids: Sequence[int]) -> None:
        """Consume the next output tokens."""
        self.num_consumed += len(token_ids)
        self.stuck = self.stuck or not self._followed.consume_tokens(list(token_ids))

    def mask(self, num_tokens: int) -> bytes:
        """Return a bit mask over a vocabulary of ``num_tokens`` tokens: 1 for each token that may come next. If stuck,
        only the stop tokens are allowed."""
        if not self.stuck:
            found = self._followed.compute_bitmask()
            bits = int.from_bytes(found, "little")
            count = bits.bit_count()
            if count > 1 and not self._followed.is_error():
                return found
            only = bits.bit_length() - 1
            # If no token can write the next character, llguidance names the token for unknown ones, which it rejects.
            self.stuck = (
                self._followed.is_error()
                or count != 1
                or not (only in self._stop_ids or self._followed.validate_tokens([only]))
            )
        if self.stuck:
            allowed_V = np.zeros(num_tokens, np.uint8)
            allowed_V[list(self._stop_ids)] = 1
            found = np.packbits(allowed_V, bitorder="little").tobytes()
        return found


def allowed_tokens(
    matchers: Sequence[Matcher | None], tokens_RC: Tensor, length_R: Tensor, prompt_R: Tensor, vocab: int
) -> Tensor:
    """Return which tokens may come next, bool [R, V]. First feeds each matcher the tokens sampled since the last call.

    Args:
        matchers: one per row; None: every token is allowed.
        tokens_RC: prompt and output tokens of each row: ``length_R`` tokens, the first ``prompt_R`` are the prompt.
    """
    width = -(-vocab // 8)
    mask_RW = np.full((len(matchers), width), 0xFF, np.uint8)
    newest = tokens_RC.gather(1, (length_R - 1)[:, None])[:, 0].tolist()
    lengths, prompts = length_R.tolist(), prompt_R.tolist()
    for row, matcher in enumerate(matchers):
        if matcher is None:
            continue
        unread = lengths[row] - prompts[row] - matcher.num_consumed
        if unread == 1:
            matcher.consume([newest[row]])
        elif unread:
            matcher.consume(tokens_RC[row, lengths[row] - unread : lengths[row]].tolist())
        bits = np.frombuffer(matcher.mask(vocab), np.uint8)[:width]
        mask_RW[row, : len(bits)] = bits
        mask_RW[row, len(bits) :] = 0
    packed_RW = torch.from_numpy(mask_RW).to(tokens_RC.device)
    place_8 = torch.arange(8, dtype=torch.uint8, device=tokens_RC.device)
    return ((packed_RW[:, :, None] >> place_8) & 1).bool().flatten(1)[:, :vocab]


class Grammars:
    """Compiles the constraints of requests in threads and caches the compiled grammars.

    Args:
        tokenizer: tokenizer of the model; None: every constraint is rejected.
        vocab_size: number of logit columns; those beyond the tokenizer's vocabulary are never sampled.
        stop_ids: tokens allowed after a complete answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast | None = None, *, vocab_size: int = 0, stop_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, tuple(stop_ids)
        self._vocabulary: asyncio.Task[Any] | None = None
        self._compiled: OrderedDict[Constraint, asyncio.Task[Followed]] = OrderedDict()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._begun: set[Constraint] = set()
        """Constraints being compiled now. A timeout is blamed on these constraints, but not on queued ones."""

    async def matchers(self, request: GenRequest) -> list[Matcher | None]:
        """Return one matcher per completion, advanced over the last ``answered`` tokens of the request's prompt.

        Entries are None if the request has no constraint.

        Raises:
            ConstraintError: as ``compile``, or the request sets ``ignore_eos`` or ``min_new_tokens``.
        """
        if request.constraint is None:
            return [None] * request.n
        if request.sampling.ignore_eos or request.sampling.min_new_tokens:
            raise ConstraintError("an answer of a given form ends where the form does: no min_tokens, no ignore_eos")
        compiled = await self.compile(request.constraint)
        found = [Matcher(compiled.deep_copy(), self._stop_ids) for _ in range(request.n)]
        for matcher in found if request.answered else ():
            matcher.begin(request.prompt_ids[-request.answered :])
        return list(found)

    async def compile(self, constraint: Constraint) -> Followed:
        """Compile a constraint; return its matcher at the start of an answer. Callers must copy the matcher before use.

        Raises:
            ConstraintError: llguidance is not installed, cannot compile the constraint within ``COMPILE_S`` or at all,
                or the tokenizer cannot write such an answer.
            Unavailable: too many constraints are pending, or ``COMPILE_S`` passed before this compilation started.
        """
        task = self._compiled.get(constraint)
        if task is None:
            if sum(not known.done() for known in self._compiled.values()) >= MAX_PENDING:
                raise Unavailable(f"{MAX_PENDING} forms of answers wait to be compiled here")
            task = asyncio.create_task(self._compile(constraint), name="compile a grammar")
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._compiled[constraint] = task
            if len(self._compiled) > MAX_KEPT:
                del self._compiled[next(known for known, other in self._compiled.items() if other.done())]
        self._compiled.move_to_end(constraint)
        done, _ = await asyncio.wait([task], timeout=COMPILE_S)
        if not done and constraint not in self._begun:
            raise Unavailable(f"other forms of answers are compiled here for {COMPILE_S:g} s")
        if not done:
            raise ConstraintError(f"what the answer is to be like is not compiled within {COMPILE_S:g} s: simplify it")
        return task.result()

    async def close(self) -> None:
        """Cancel all compilations. Safe to repeat."""
        await end_tasks([*self._compiled.values(), *([self._vocabulary] if self._vocabulary is not None else [])])

    async def _compile(self, constraint: Constraint) -> Followed:
        if importlib.util.find_spec("llguidance") is None:
            raise ConstraintError(
                "answers of a given form need the package 'llguidance' on the rollout workers: "
                "install penstock[structured] there"
            )
        if self._tokenizer is None or not self._stop_ids:
            raise ConstraintError(
                "this model has no tokenizer or no stop token, so no answer of a given form could end"
            )
        async with self._slots:
            if self._vocabulary is None:
                self._vocabulary = asyncio.create_task(
                    asyncio.to_thread(_vocabulary, self._tokenizer, self._vocab_size, self._stop_ids)
                )
                self._vocabulary.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            try:
                vocabulary = await asyncio.shield(self._vocabulary)
            except ValueError as error:
                raise ConstraintError(
                    f"the tokens of this model cannot be read as text, so no form can be kept to: {error}"
                ) from None
            self._begun.add(constraint)
            try:
                return await asyncio.to_thread(_compiled, constraint, vocabulary, self._stop_ids, self._vocab_size)
            finally:
                self._begun.discard(constraint)


def _compiled(constraint: Constraint, vocabulary: Any, stop_ids: Sequence[int], vocab_size: int) -> Followed:
    import llguidance

    limits = llguidance.LLParserLimits(
        max_grammar_size=MAX_SYMBOLS,
        initial_lexer_fuel=START_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        verbose_errors=False,
    )
    try:
        grammar = llguidance.LLMatcher.grammar_from_lark(grammar_of(constraint))
        matcher: Followed = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    except ValueError as error:
        raise ConstraintError(_flaw(str(error))) from None
    if matcher.is_error():
        raise ConstraintError(_flaw(matcher.get_error()))
    first = Matcher(matcher.deep_copy(), stop_ids)
    first.mask(vocab_size)
    if first.stuck:
        raise ConstraintError("this model's tokenizer has no tokens for an answer of that form")
    return matcher


def _flaw(text: str) -> str:
    """Return an error for the author of a schema: llguidance's message without its internal state and the grammar."""
    text = text.partition("\n   1 | ")[0].removeprefix("failed to compile JSON schema: ")
    return f"no grammar can be made of the schema: {text.partition('<state>')[0].strip()[:400]}"


def _vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_ids: Sequence[int]) -> Any:
    """Return llguidance's tokenizer for the vocabulary. Raises ValueError if the tokens cannot be mapped to bytes."""
    import llguidance
    from llguidance.hf import from_tokenizer

    backend: Any = tokenizer.backend_tokenizer
    decoder = json.loads(backend.to_str())["decoder"] or {}
    if decoder.get("type") != "Fuse":
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(stop_ids))
    wrapper = llguidance.TokenizerWrapper(_Texts(tokenizer, stop_ids))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(stop_ids))


class _Texts:
    """Adapter to llguidance for tokenizers that form a text by concatenating its tokens (decoder `Fuse`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int]) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self.eos_token_id, self.bos_token_id = stop_ids[0], tokenizer.bos_token_id
        self.special_token_ids = list(tokenizer.all_special_ids)
        self.tokens = [str(self._backend.id_to_token(token) or "").encode() for token in range(len(tokenizer))]

    def __call__(self, text: bytes) -> list[int]:
        return list(self._backend.encode(text.decode(), add_special_tokens=False).ids)
