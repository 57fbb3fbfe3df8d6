"""Conversion of a row to a prompt: text, token ids and the reference answer. The tokenizer is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import xxhash

from penstock.shared.config.data import DataConfig, PromptConfig, source_names
from penstock.shared.data.order import DataOrder, Place
from penstock.shared.data.rows import Rows, open_rows
from penstock.shared.data.template import Template, missing_field
from penstock.shared.errors import ConfigError, DataError

__all__ = ["Demonstration", "Prompt", "PromptBuilder", "PromptSource", "Tokenizer", "source_seed"]


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that this module calls."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt: ``token_ids`` [P] encode ``text``. If ``too_long`` is True, no completion may be generated.

    ``source`` is the name of the data source that holds ``row``.
    """

    text: str
    token_ids: list[int]
    answer: str | None
    row: dict[str, Any]
    too_long: bool
    source: str = ""


class Demonstration(NamedTuple):
    """Example for supervised training; ``mask`` is 1 for the tokens of ``answer_ids`` that the loss covers."""

    prompt_ids: list[int]
    answer_ids: list[int]
    mask: list[int]

    def extended(self, token: int) -> Demonstration:
        """Return a copy with ``token`` appended to the answer; the loss covers this token, too."""
        return Demonstration(self.prompt_ids, [*self.answer_ids, token], [*self.mask, 1])


class PromptBuilder:
    """Renders rows as prompts. A prompt without chat template begins with the system message on a separate line."""

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer, demonstration: Sequence[str] = ()) -> None:
        """Prepare the templates. Raises DataError for a broken template, and ConfigError if `add_bos` is set but the
        tokenizer has no beginning-of-sequence token."""
        self._config = config
        self._tokenizer = tokenizer
        self._template = Template(config.template, "data.prompt.template")
        self._answer = None if config.answer is None else Template(config.answer, "data.prompt.answer")
        self._demonstration = [Template(text, "warm_start.demonstration") for text in demonstration]
        if config.add_bos and tokenizer.bos_token_id is None:
            raise ConfigError("data.prompt.add_bos: the tokenizer has no beginning-of-sequence token")
        begins = config.add_bos if config.add_bos is not None else _begins_texts(tokenizer)
        self._bos = [tokenizer.bos_token_id] if begins and tokenizer.bos_token_id is not None else []

    def build(self, row: dict[str, Any], place: str = "row", source: str = "") -> Prompt:
        """Render and tokenize one row of ``source``; ``place`` names the row in errors.

        Raises:
            DataError: a field is missing or of the wrong type, or the chat template rejects the messages.
        """
        chat = self._config.chat or self._config.messages is not None
        text = self._chat_text(row, place) if chat else self._plain_text(row, place)
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if not chat:
            token_ids = self._bos + token_ids
        if not token_ids:
            raise DataError(f"{place}: the prompt is empty")
        answer = None if self._answer is None else self._answer.render(row, place)
        too_long = len(token_ids) > self._config.max_tokens
        return Prompt(text, token_ids, answer, row, too_long=too_long, source=source)

    def demonstrate(self, prompt: Prompt, place: str = "row") -> Demonstration:
        """Return an example whose answer is the job's ``warm_start.demonstration``, or else the reference answer.

        An end-of-sequence token follows. The texts of a demonstration come in turn from the policy and from the
        environment; only those of the policy are trained.

        Raises:
            DataError: rows have no answer, or lack a field.
        """
        texts = [template.render(prompt.row, place) for template in self._demonstration]
        if not texts:
            if prompt.answer is None:
                raise DataError("data.prompt.answer is null: a warm start needs reference answers")
            texts = [prompt.answer]
        end = self._tokenizer.eos_token_id
        parts = [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        parts[-1] += [] if end is None else [end]
        mask = [1 - turn % 2 for turn, part in enumerate(parts) for _ in part]
        return Demonstration(prompt.token_ids, [token for part in parts for token in part], mask)

    def _plain_text(self, row: dict[str, Any], place: str) -> str:
        text = self._template.render(row, place)
        return text if self._config.system is None else f"{self._config.system}\n{text}"

    def _chat_text(self, row: dict[str, Any], place: str) -> str:
        if self._config.messages is None:
            messages = [{"role": "user", "content": self._template.render(row, place)}]
        else:
            messages = check_messages(row, self._config.messages, place)
        if self._config.system is not None:
            messages = [{"role": "system", "content": self._config.system}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._config.chat_template_args
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{place}: the chat template refuses the messages: {error}") from None
        return str(text)


def _begins_texts(tokenizer: Tokenizer) -> bool:
    """Return True if the tokenizer itself prepends its beginning-of-sequence token to a text."""
    ids = tokenizer.encode("a", add_special_tokens=True)
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def check_messages(row: dict[str, Any], field: str, place: str) -> list[dict[str, Any]]:
    """Return the chat messages of a row.

    Raises:
        DataError: the field is missing, empty, or not a list of objects with `role` and `content`.
    """
    if field not in row:
        raise DataError(missing_field(place, field, row, "data.prompt.messages"))
    messages = row[field]
    fits = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    if not fits or any("role" not in m or "content" not in m for m in messages):
        raise DataError(f"{place}: field '{field}' must be a list of messages with 'role' and 'content'")
    return list(messages)


def source_seed(seed: int, split: str, position: int) -> int:
    """Return the seed of source number ``position`` of ``split``; no other source of the job has the same seed."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{split}:{position}".encode())


class PromptSource:
    """All prompts of a job: training prompts by ordinal, held-out prompts by index. The constructor blocks on files."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, seed: int, *, demonstration: Sequence[str] = ()
    ) -> None:
        """Open the sources. ``demonstration`` is the key ``warm_start.demonstration`` of the job. Raises DataError if
        the data cannot be used."""
        self._config = config
        self._builder = PromptBuilder(config.prompt, tokenizer, demonstration)
        self._train = [open_rows(s, seed=source_seed(seed, "train", i)) for i, s in enumerate(config.train)]
        self._eval = [open_rows(s, seed=source_seed(seed, "eval", i)) for i, s in enumerate(config.eval)]
        self._names, self._eval_names = source_names(config.train), source_names(config.eval)
        self._order = DataOrder(config, self._train, seed)

    @property
    def rows_per_epoch(self) -> int:
        """Number of ordinals in one epoch of the training data."""
        return self._order.rows_per_epoch

    @property
    def num_eval(self) -> int:
        """Number of held-out prompts."""
        return sum(len(rows) for rows in self._eval)

    def train(self, ordinal: int) -> Prompt:
        """Return the training prompt at position ``ordinal`` of the data order."""
        return self._at(self._order(ordinal))

    def eval(self, index: int) -> Prompt:
        """Return the held-out prompt number ``index``, counted through all held-out sources, one after another.

        Raises:
            IndexError: ``index`` is negative, or not below ``num_eval``.
        """
        offset = index
        for name, rows in zip(self._eval_names, self._eval, strict=True):
            if 0 <= offset < len(rows):
                return self._build(rows, offset, name)
            offset -= len(rows)
        raise IndexError(f"held-out prompt {index} of {self.num_eval}")

    def warm_start_batches(self, batch_size: int, steps: int, seed: int) -> Iterator[list[Demonstration]]:
        """Yield ``steps`` batches of demonstrations from the training rows, shuffled with another seed than in
        training.

        Prompts that are too long are skipped.

        Raises:
            DataError: rows have no answer, or every prompt of an epoch is too long.
        """
        order, ordinal, passed_over = DataOrder(self._config, self._train, source_seed(seed, "warm", 0)), 0, 0
        for _ in range(steps):
            batch: list[Demonstration] = []
            while len(batch) < batch_size:
                place = order(ordinal)
                prompt = self._at(place)
                ordinal, passed_over = ordinal + 1, passed_over + 1 if prompt.too_long else 0
                if passed_over > self.rows_per_epoch:
                    raise DataError(
                        f"every prompt is longer than data.prompt.max_tokens ({self._config.prompt.max_tokens})"
                    )
                if not prompt.too_long:
                    batch.append(self._builder.demonstrate(prompt, self._train[place.source].where(place.row)))
            yield batch

    def _at(self, place: Place) -> Prompt:
        return self._build(self._train[place.source], place.row, self._names[place.source])

    def _build(self, rows: Rows, row: int, source: str) -> Prompt:
        return self._builder.build(rows[row], rows.where(row), source)
