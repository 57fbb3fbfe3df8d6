"""Prompt data: sources (files, mixtures of files, generators) and how a row becomes a prompt."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from penstock.shared.config.base import FileName, OptionalFileName, StrictModel

__all__ = [
    "SORTING_SYMBOLS",
    "AdditionSource",
    "CalculatorSource",
    "DataConfig",
    "FileSource",
    "PromptConfig",
    "SortingSource",
    "Source",
    "Sources",
    "TasksSource",
    "source_names",
]

SORTING_SYMBOLS = "#" + string.digits + "@" + string.ascii_uppercase + string.ascii_lowercase
"""The 64 symbols of the sorting task, in sort order."""


class _AnySource(StrictModel):
    name: str | None = Field(None, pattern=r"^[a-z0-9_.-]{1,32}$")
    """Name of this source in metrics and samples; default: its type, with suffix `-2`, `-3` for further sources of
    that type."""
    weight: float = Field(1.0, gt=0)
    """Share of this source in a mixture, relative to the others."""


class FileSource(_AnySource):
    """Rows from JSONL, Parquet, or a Hugging Face `datasets` directory on disk (detected by the suffix)."""

    type: Literal["file"] = "file"
    path: FileName
    """File or directory as every service sees it, or the id of an uploaded file. The client uploads a file
    of at most 16 MiB (JSON lines, Parquet) that a job file names as `./FILE`."""
    limit: int | None = Field(None, ge=1)
    """Use only this many rows from the start; null: all rows."""


class CalculatorSource(_AnySource):
    """The calculator annotations ``<<48/2=24>>`` inside GSM8K solutions: prompt ``48/2=``, answer ``24``."""

    type: Literal["gsm8k_calculator"] = "gsm8k_calculator"
    path: FileName
    """A GSM8K JSONL file with `answer` fields."""
    exclude_path: OptionalFileName = None
    """Leave out every expression that occurs in this file (held-out evaluation without leakage)."""
    max_chars: int = Field(24, ge=4)
    """Longest expression in characters; longer ones are skipped and counted."""
    skip: int = Field(0, ge=0)
    """Number of expressions to skip at the start, after exclusions; for example those used by a warm start."""
    limit: int | None = Field(None, ge=1)
    """Use only this many expressions after the skipped ones; null: all."""


class AdditionSource(_AnySource):
    """Generated addition problems ``a+b=``; a row depends only on the seed and its ordinal."""

    type: Literal["addition"] = "addition"
    digits: int = Field(1, ge=1, le=9)
    """Operands are drawn from 0 to 10**digits - 1."""
    num_rows: int = Field(4096, ge=1)
    """Rows in one epoch."""


class SortingSource(_AnySource):
    """Generated sorting problems: ``b7Ka=`` must be continued with ``7Kab``. Answers are as long as their prompts.

    No symbol occurs twice; the order is that of the character codes. The `char` tokenizer needs
    ``#0123456789@ABC...XYZabc...xyz=`` as its `characters`.
    """

    type: Literal["sorting"] = "sorting"
    min_items: int = Field(8, ge=1, le=64)
    """Fewest symbols of a problem."""
    max_items: int = Field(64, ge=1, le=64)
    """Most symbols of a problem."""
    astray: float = Field(0.0, ge=0, le=1)
    """Fraction of rows with a corrupted answer: from a random position on it has random symbols, and ends after at most
    63 symbols. For a warm start on imperfect demonstrations; not usable as reference answers."""
    rambling: float = Field(0.0, ge=0, le=1)
    """Fraction of rows, beside the corrupted ones, whose answer is all 64 symbols in reverse order. For a warm start
    on two styles, one of which needs more tokens than `max_new_tokens` allows."""
    num_rows: int = Field(4096, ge=1)
    """Rows in one epoch."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SortingSource:
        if self.min_items > self.max_items:
            raise ValueError(f"min_items {self.min_items} is larger than max_items {self.max_items}")
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> SortingSource:
        if self.astray + self.rambling > 1:
            raise ValueError(f"astray ({self.astray}) and rambling ({self.rambling}) are shares: together at most 1")
        return self


class TasksSource(_AnySource):
    """Tasks of the job's `environment`, each named by its number; only for `environment.type: verifiers`."""

    type: Literal["tasks"] = "tasks"
    num_rows: int = Field(ge=1)
    """Tasks in one epoch."""
    skip: int = Field(0, ge=0)
    """Number of first tasks to skip, for example those used by another source."""


Source = Annotated[
    FileSource | CalculatorSource | AdditionSource | SortingSource | TasksSource, Field(discriminator="type")
]


def source_names(sources: Sequence[Source]) -> list[str]:
    """Return the name of each source: its `name`, or else its type. The second and later sources of one type get a
    number: `file`, `file-2`."""
    names = [source.name or "" for source in sources]
    for place, source in enumerate(sources):
        numbered = (source.type if number == 1 else f"{source.type}-{number}" for number in count(1))
        names[place] = names[place] or next(name for name in numbered if name not in names)
    return names


def _check_names(sources: list[Source]) -> list[Source]:
    shared = [name for name, times in Counter(source_names(sources)).items() if times > 1]
    if shared:
        raise ValueError(f"several sources have the name '{shared[0]}': give each a name of its own")
    return sources


Sources = Annotated[list[Source], AfterValidator(_check_names)]
"""Sources with unique names."""


class PromptConfig(StrictModel):
    """Conversion of a row to a prompt and a reference answer."""

    template: str = "{prompt}"
    """Python format string over the row's fields, with widths up to 1000; ignored if `messages` is set."""
    chat: bool = False
    """Send the filled-in template as one user message through the tokenizer's chat template."""
    messages: str | None = None
    """Field that holds chat messages; rendered with the tokenizer's chat template."""
    system: str | None = None
    """System message placed before the other messages (chat) or before the prompt (plain)."""
    answer: str | None = "{answer}"
    """Format string of the reference answer; null if the scorers need no answer."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments passed to `apply_chat_template`, for example `enable_thinking: false`."""
    add_bos: bool | None = None
    """Prepend the beginning-of-sequence token to a plain prompt; null: only if the tokenizer prepends this token to
    texts."""
    max_tokens: int = Field(256, ge=1)
    """Longest prompt in tokens. A draw with a longer prompt ends as `dropped(prompt_too_long)` and is counted."""

    @model_validator(mode="after")
    def _one_kind_of_chat(self) -> PromptConfig:
        if self.chat and self.messages is not None:
            raise ValueError(f"messages: '{self.messages}' is a chat already; leave out chat, or messages")
        if self.chat and self.add_bos:
            raise ValueError("add_bos: a chat template writes its own beginning-of-sequence token")
        return self


class DataConfig(StrictModel):
    """Training and held-out data."""

    train: Sources = Field(min_length=1)
    """One source, or a weighted mixture."""
    eval: Sources = Field(default_factory=list)
    """Sources of held-out data; empty: no held-out data."""
    prompt: PromptConfig = PromptConfig()
    """Conversion of rows to prompts."""
    shuffle: bool = True
    """Shuffle each epoch by the seed; false: keep the order of the file."""
    curriculum: Annotated[str | None, "code"] = None
    """Function `rank(row: dict) -> float`, as `package.module:function`: within an epoch rows are drawn in ascending
    rank (easy first)."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_is_a_list(cls, data: Any) -> Any:
        """Accept `train: {type: file, ...}` as a list with one source."""
        if isinstance(data, dict):
            data = {**data, **{k: [data[k]] for k in ("train", "eval") if isinstance(data.get(k), dict)}}
        return data

    def with_tools(self, schemas: list[dict[str, Any]]) -> DataConfig:
        """Return this section with ``schemas`` as the tools of the chat template. If the job file already sets tools or
        the prompt is plain, the section stays unchanged."""
        prompt = self.prompt
        if not schemas or not (prompt.chat or prompt.messages is not None) or "tools" in prompt.chat_template_args:
            return self
        args = {**prompt.chat_template_args, "tools": schemas}
        return self.model_copy(update={"prompt": prompt.model_copy(update={"chat_template_args": args})})
