"""Graders in the format of OpenAI's fine-tuning API (Graders guide and API reference, 2026-08)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.rewards.formula import Formula
from penstock.shared.config.rewards.slots import check_slots, item_fields

__all__ = [
    "AnyGrader",
    "Grader",
    "GraderMessage",
    "GraderPart",
    "GraderSampling",
    "InlineGrader",
    "MultiGrader",
    "Part",
    "PythonGrader",
    "ScoreModelGrader",
    "SingleGrader",
    "StringCheckGrader",
    "TextSimilarityGrader",
    "fields_of",
    "parts_of",
    "total_of",
]

MAX_PARTS = 8
MAX_SOURCE = 256 << 10
_UPLOADED = re.compile(r"[A-Za-z_]\w*@[0-9a-f]{64}:grade")
Slotted = Annotated[str, AfterValidator(check_slots)]
"""Text with slots ``{{ item.FIELD }}`` (field of the data row) and ``{{ sample.output_text }}`` (the completion)."""


class _Grader(StrictModel):
    name: str = Field(min_length=1, max_length=64)
    """Name for display."""


class StringCheckGrader(_Grader):
    """Comparison of two strings: the score is 1 if the comparison holds, else 0."""

    type: Literal["string_check"] = "string_check"
    input: Slotted
    """Text that is graded."""
    reference: Slotted
    """Text to compare with."""
    operation: Literal["eq", "ne", "like", "ilike"]
    """`eq`: equal; `ne`: not equal; `like`: the input contains the reference; `ilike`: the same, ignoring case."""


class TextSimilarityGrader(_Grader):
    """Similarity of two texts: a score from 0 to 1."""

    type: Literal["text_similarity"] = "text_similarity"
    input: Slotted
    """Text that is graded."""
    reference: Slotted
    """Text to compare with."""
    evaluation_metric: Literal[
        "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
    ]
    """`fuzzy_match`: edit similarity of characters; BLEU and GLEU of up to four words; F1 of ROUGE-N and ROUGE-L."""


def _uploaded_name(value: str | None) -> str | None:
    if value is not None and not _UPLOADED.fullmatch(value):
        raise ValueError(
            f"found '{value[:80]}'; must be ./FILE.py, a file with a function grade(sample, item), which "
            "`penstock submit` and Client.submit upload and name by FILE@SHA256:grade"
        )
    return value


class PythonGrader(_Grader):
    """Python program with a function ``grade(sample, item)`` that returns the score; runs in a sandbox. Set either
    ``source`` or ``path``."""

    type: Literal["python"] = "python"
    source: str | None = Field(None, min_length=1, max_length=MAX_SOURCE)
    """Source code. Only the standard library can be imported."""
    path: Annotated[str | None, AfterValidator(_uploaded_name), "code"] = None
    """File of the source code, `./grade.py`, relative to the job file and uploaded with it."""

    @model_validator(mode="after")
    def _one_program(self) -> PythonGrader:
        if (self.source is None) == (self.path is None):
            found = "neither is set" if self.source is None else "both are set"
            raise ValueError(f"set either source (the code itself) or path (its file, like ./grade.py): {found}")
        return self


class GraderPart(StrictModel):
    """Part of a message to the grading model."""

    type: Literal["input_text", "output_text"] = "input_text"
    """Type of the part, as in OpenAI's messages; both types mean text."""
    text: Slotted
    """Text with slots."""


class GraderMessage(StrictModel):
    """Message to the grading model."""

    role: Literal["user", "assistant", "system", "developer"]
    """Role of the message's author."""
    content: Slotted | list[GraderPart]
    """Text with slots, or a list of parts."""
    type: Literal["message"] = "message"

    @property
    def text(self) -> str:
        """Text of all parts of the message; its slots are not filled in yet."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GraderSampling(StrictModel):
    """Sampling settings of the grading model."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Sampling temperature; null: the endpoint's default."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    seed: int | None = None
    """Seed of the sampler."""
    max_completions_tokens: int | None = Field(None, ge=1)
    """Longest reply in tokens."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort of the model, passed on unchanged."""


class ScoreModelGrader(_Grader):
    """Score returned by a language model."""

    type: Literal["score_model"] = "score_model"
    model: str = Field(min_length=1, max_length=256)
    """Model name in the request."""
    input: list[GraderMessage] = Field(min_length=1, max_length=64)
    """Messages of the request."""
    range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score; a score outside is an error."""
    sampling_params: GraderSampling = GraderSampling()
    """Sampling settings."""

    @field_validator("range", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _rising_range(self) -> ScoreModelGrader:
        if not self.range[0] < self.range[1]:
            raise ValueError("range: the lowest score must be smaller than the highest")
        return self


SingleGrader = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader, Field(discriminator="type")
]


class MultiGrader(_Grader):
    """A formula over the scores of several graders."""

    type: Literal["multi"] = "multi"
    graders: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")], SingleGrader] = Field(
        min_length=1, max_length=MAX_PARTS
    )
    """Graders, by their names in the formula."""
    calculate_output: str = Field(min_length=1)
    """Formula with `+ - * / ^`, `min`, `max`, `abs`, `floor`, `ceil`, `exp`, `sqrt`, `log`."""

    @field_validator("graders", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        """Accept a single grader in place of a mapping of graders, because OpenAI's SDK and OpenAI's guide differ
        here."""
        if isinstance(value, dict) and isinstance(value.get("type"), str):
            return {str(value.get("name")): value}
        return value

    @model_validator(mode="after")
    def _formula_fits(self) -> MultiGrader:
        try:
            unknown = Formula(self.calculate_output).names - self.graders.keys()
        except ValueError as error:
            raise ValueError(f"calculate_output: {error}") from None
        if unknown:
            raise ValueError(
                f"calculate_output: no grader is named '{min(unknown)}'; there are {', '.join(self.graders)}"
            )
        return self


Grader = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader | MultiGrader,
    Field(discriminator="type"),
]
Part = StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader
AnyGrader = Part | MultiGrader


def _inline(grader: AnyGrader) -> AnyGrader:
    if any(isinstance(part, PythonGrader) and part.path is not None for part in parts_of(grader).values()):
        raise ValueError("path: only the grader of a job file may name a file; set source")
    return grader


InlineGrader = Annotated[Grader, AfterValidator(_inline)]
"""Grader of OpenAI's API, where the source code of a Python grader is part of the request."""


def parts_of(grader: AnyGrader) -> dict[str, Part]:
    """Return the parts of a grader by name; a grader without a formula is its only part."""
    return dict(grader.graders) if isinstance(grader, MultiGrader) else {grader.name: grader}


def fields_of(grader: AnyGrader) -> set[str]:
    """Return the fields of the data row that the grader's texts use in slots ``{{ item.FIELD }}``. A Python grader may
    read further fields."""
    return {field for part in parts_of(grader).values() for text in _texts(part) for field in item_fields(text)}


def _texts(part: Part) -> Iterator[str]:
    if isinstance(part, StringCheckGrader | TextSimilarityGrader):
        yield from (part.input, part.reference)
    elif isinstance(part, ScoreModelGrader):
        yield from (message.text for message in part.input)


def total_of(grader: AnyGrader, scores: Mapping[str, float]) -> float:
    """Compute the score of a grader from the scores of its parts. Raises ValueError if the formula has no finite
    result."""
    if isinstance(grader, MultiGrader):
        return Formula(grader.calculate_output).value(scores)
    (only,) = scores.values()
    return only
