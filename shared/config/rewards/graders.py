"""Graders in the format of OpenAI's fine-tuning API (Graders guide and API reference, 2026-08)."""

from __future__ import annotations

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
Slotted = Annotated[str, AfterValidator(check_slots)]
"""Text with slots ``{{ item.FIELD }}`` (of the data row) and ``{{ sample.output_text }}`` (what the policy wrote)."""


class _Grader(StrictModel):
    name: str = Field(min_length=1, max_length=64)
    """Name, for people."""


class StringCheckGrader(_Grader):
    """1 if two texts compare as wanted, else 0."""

    type: Literal["string_check"] = "string_check"
    input: Slotted
    """Text that is graded."""
    reference: Slotted
    """Text that it is compared with."""
    operation: Literal["eq", "ne", "like", "ilike"]
    """Equal; not equal; the input contains the reference; the same without regard to case."""


class TextSimilarityGrader(_Grader):
    """How similar two texts are, from 0 to 1."""

    type: Literal["text_similarity"] = "text_similarity"
    input: Slotted
    """Text that is graded."""
    reference: Slotted
    """Text that it is compared with."""
    evaluation_metric: Literal[
        "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
    ]
    """`fuzzy_match`: edit similarity of characters; BLEU and GLEU of up to four words; F1 of ROUGE-N and ROUGE-L."""


class PythonGrader(_Grader):
    """Value of the function ``grade(sample, item)`` of a program; the program runs in a sandbox."""

    type: Literal["python"] = "python"
    source: str = Field(min_length=1, max_length=MAX_SOURCE)
    """The program. It can import the standard library."""


class GraderPart(StrictModel):
    """A piece of a message."""

    type: Literal["input_text", "output_text"] = "input_text"
    """As OpenAI's messages have it; both are text."""
    text: Slotted
    """Text with slots."""


class GraderMessage(StrictModel):
    """A message to the model that grades."""

    role: Literal["user", "assistant", "system", "developer"]
    """Whose message it is."""
    content: Slotted | list[GraderPart]
    """Text with slots, or pieces of text."""
    type: Literal["message"] = "message"

    @property
    def text(self) -> str:
        """All of it, with slots."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GraderSampling(StrictModel):
    """How the model that grades is sampled."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Sampling temperature; null leaves it to the endpoint."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    seed: int | None = None
    """Seed of the sampler."""
    max_completions_tokens: int | None = Field(None, ge=1)
    """Longest reply."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Passed on as it is."""


class ScoreModelGrader(_Grader):
    """A number from a language model."""

    type: Literal["score_model"] = "score_model"
    model: str = Field(min_length=1, max_length=256)
    """Model name in the request."""
    input: list[GraderMessage] = Field(min_length=1, max_length=64)
    """Messages to it."""
    range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score; one outside is an error."""
    sampling_params: GraderSampling = GraderSampling()
    """How it is sampled."""

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
    """The graders by the names that they have in the formula."""
    calculate_output: str = Field(min_length=1)
    """Formula with `+ - * / ^`, `min`, `max`, `abs`, `floor`, `ceil`, `exp`, `sqrt`, `log`."""

    @field_validator("graders", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        """OpenAI's SDK declares a single grader here, its guide a mapping."""
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


def parts_of(grader: AnyGrader) -> dict[str, Part]:
    """The graders that a grader is made of, by name; itself where it is no formula."""
    return dict(grader.graders) if isinstance(grader, MultiGrader) else {grader.name: grader}


def fields_of(grader: AnyGrader) -> set[str]:
    """Fields of a data row that it needs; a Python grader may look for more."""
    return {field for part in parts_of(grader).values() for text in _texts(part) for field in item_fields(text)}


def _texts(part: Part) -> Iterator[str]:
    if isinstance(part, StringCheckGrader | TextSimilarityGrader):
        yield from (part.input, part.reference)
    elif isinstance(part, ScoreModelGrader):
        yield from (message.text for message in part.input)


def total_of(grader: AnyGrader, scores: Mapping[str, float]) -> float:
    """The score of a grader from those of its parts. Raises ValueError where its formula has none."""
    if isinstance(grader, MultiGrader):
        return Formula(grader.calculate_output).value(scores)
    (only,) = scores.values()
    return only
