"""Where prompts come from: files, mixtures of files, or a generator; and how a row becomes a prompt."""

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
"""The 64 symbols of the sorting task, in their order."""


class _AnySource(StrictModel):
    name: str | None = Field(None, pattern=r"^[a-z0-9_.-]{1,32}$")
    """Name of this source in metrics and samples; default: its type, with `-2`, `-3` for further ones of that type."""
    weight: float = Field(1.0, gt=0)
    """Share of this source in a mixture, relative to the others."""


class FileSource(_AnySource):
    """Rows from JSONL, Parquet, or a Hugging Face `datasets` directory on disk (told apart by the suffix)."""

    type: Literal["file"] = "file"
    path: FileName
    """File or directory, as seen by every service, or the id of an uploaded file. JSON lines of at most 16 MiB that a
    job file names by `./` are uploaded with it."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows."""


class CalculatorSource(_AnySource):
    """The calculator annotations ``<<48/2=24>>`` inside GSM8K solutions: prompt ``48/2=``, answer ``24``."""

    type: Literal["gsm8k_calculator"] = "gsm8k_calculator"
    path: FileName
    """A GSM8K JSONL file with `answer` fields."""
    exclude_path: OptionalFileName = None
    """Leave out every expression that occurs in this file (held-out evaluation without leakage)."""
    max_chars: int = Field(24, ge=4)
    """Longer expressions are left out and counted."""
    skip: int = Field(0, ge=0)
    """Leave out the first expressions that remain, for example those that a warm start shows."""
    limit: int | None = Field(None, ge=1)
    """Use only the first expressions after those."""


class AdditionSource(_AnySource):
    """Endless addition problems ``a+b=``, a pure function of seed and ordinal."""

    type: Literal["addition"] = "addition"
    digits: int = Field(1, ge=1, le=9)
    """Operands are drawn from 0 to 10**digits - 1."""
    num_rows: int = Field(4096, ge=1)
    """Rows in one epoch."""


class SortingSource(_AnySource):
    """Endless sorting problems: ``b7Ka=`` must be continued with ``7Kab``. Answers are as long as their prompts.

    No symbol occurs twice; the order is that of the character codes. The `char` tokenizer needs
    ``#0123456789@ABC...XYZabc...xyz=`` as its `characters`.
    """

    type: Literal["sorting"] = "sorting"
    min_items: int = Field(8, ge=1, le=64)
    """Fewest symbols of a problem."""
    max_items: int = Field(64, ge=1, le=64)
    """Most symbols of a problem."""
    astray: float = Field(0.0, ge=0, le=1)
    """Share of rows whose answer goes astray: from a random place on it is random symbols, as many as it happens, up
    to 63 in all. For a warm start on imperfect demonstrations; as a reference answer such a row makes no sense."""
    rambling: float = Field(0.0, ge=0, le=1)
    """Share of rows, beside those astray, whose answer is the 64 symbols there are, backwards. For a warm start in two
    styles, one of which needs more tokens than `max_new_tokens` gives."""
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
    """Tasks that the job's `environment` brings, by their number: for `environment.type: verifiers`."""

    type: Literal["tasks"] = "tasks"
    num_rows: int = Field(ge=1)
    """Tasks in one epoch."""
    skip: int = Field(0, ge=0)
    """The first tasks that are left out, for example those that another source has."""


Source = Annotated[
    FileSource | CalculatorSource | AdditionSource | SortingSource | TasksSource, Field(discriminator="type")
]


def source_names(sources: Sequence[Source]) -> list[str]:
    """Names of the sources: `name`, or else the type, numbered from the second one of that type on."""
    names = [source.name or "" for source in sources]
    for place, source in enumerate(sources):
        numbered = (source.type if number == 1 else f"{source.type}-{number}" for number in count(1))
        names[place] = names[place] or next(name for name in numbered if name not in names)
    return names


def _told_apart(sources: list[Source]) -> list[Source]:
    shared = [name for name, times in Counter(source_names(sources)).items() if times > 1]
    if shared:
        raise ValueError(f"several sources have the name '{shared[0]}': give each a name of its own")
    return sources


Sources = Annotated[list[Source], AfterValidator(_told_apart)]
"""Sources that are told apart by their names."""


class PromptConfig(StrictModel):
    """How a row becomes a prompt and a reference answer."""

    template: str = "{prompt}"
    """Python format string over the row's fields, widths up to 1000; ignored when `messages` is set."""
    chat: bool = False
    """Send the filled-in template as one user message through the tokenizer's chat template."""
    messages: str | None = None
    """Field that holds chat messages; rendered with the tokenizer's chat template."""
    system: str | None = None
    """System message put before the others (chat) or before the prompt (plain)."""
    answer: str | None = "{answer}"
    """Format string of the reference answer; null when the scorers need none."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to `apply_chat_template`, for example `enable_thinking: false`."""
    add_bos: bool | None = None
    """Put the beginning-of-sequence token before a plain prompt; null: where the tokenizer puts it before a text."""
    max_tokens: int = Field(256, ge=1)
    """Longer prompts are filtered: their draw ends as `dropped(prompt_too_long)` and is counted."""

    @model_validator(mode="after")
    def _one_kind_of_chat(self) -> PromptConfig:
        if self.chat and self.messages is not None:
            raise ValueError(f"messages: '{self.messages}' is a chat already; leave out chat, or messages")
        if self.chat and self.add_bos:
            raise ValueError("add_bos: a chat template writes its own beginning-of-sequence token")
        return self


class DataConfig(StrictModel):
    """Training and held-out prompts."""

    train: Sources = Field(min_length=1)
    """One source, or a weighted mixture."""
    eval: Sources = Field(default_factory=list)
    """Held-out sources; empty: no evaluation data."""
    prompt: PromptConfig = PromptConfig()
    """How rows become prompts."""
    shuffle: bool = True
    """Seeded permutation per epoch; false keeps the file's order."""
    curriculum: Annotated[str | None, "code"] = None
    """Dotted path of ``rank(row: dict) -> float``: rows are drawn in rising order within an epoch (easy first)."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_is_a_list(cls, data: Any) -> Any:
        """`train: {type: file, ...}` is short for a list with one source."""
        if isinstance(data, dict):
            data = {**data, **{k: [data[k]] for k in ("train", "eval") if isinstance(data.get(k), dict)}}
        return data

    def with_tools(self, schemas: list[dict[str, Any]]) -> DataConfig:
        """The same where the chat template is told of tools, unless it is already; a plain prompt knows none."""
        prompt = self.prompt
        if not schemas or not (prompt.chat or prompt.messages is not None) or "tools" in prompt.chat_template_args:
            return self
        told = {**prompt.chat_template_args, "tools": schemas}
        return self.model_copy(update={"prompt": prompt.model_copy(update={"chat_template_args": told})})
