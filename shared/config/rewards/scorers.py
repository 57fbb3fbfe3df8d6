"""Configuration of the scorers. Each runs in a killable process of the reward service."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.shared.config.base import CodeName, FileName, StrictModel
from penstock.shared.config.rewards.graders import Grader, ScoreModelGrader, parts_of

__all__ = [
    "CodeScorer",
    "EnvironmentScorer",
    "ExactScorer",
    "FormatScorer",
    "FunctionScorer",
    "GraderScorer",
    "HttpScorer",
    "JudgeScorer",
    "MathScorer",
    "RewardModelScorer",
    "ScorerConfig",
]

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{1,63}")


def _web_address(value: str) -> str:
    """Raises ValueError unless ``value`` is an http(s) URL without credentials."""
    try:
        parts = urlsplit(value)
        host, secret = parts.hostname, parts.password or parts.username
        _ = parts.port  # raises where it is not a number
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"'{value}' is not an http:// or https:// URL with a host")
    if secret:
        raise ValueError("a URL in a job file must not hold a user or password: name an environment variable instead")
    return value.rstrip("/")


def _variable_name(value: str) -> str:
    """Raises ValueError unless ``value`` may name a variable that holds a key for somebody else's service."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError(
            "must be the NAME of an environment variable of the reward service (upper case), never the key itself"
        )
    if value.startswith("PENSTOCK_"):
        raise ValueError("variables of Penstock itself are not sent anywhere; choose another name")
    return value


WebAddress = Annotated[str, AfterValidator(_web_address)]
VariableName = Annotated[str, AfterValidator(_variable_name)]


def _pattern(value: str, *, groups: int | None = None) -> str:
    try:
        found = re.compile(value, re.DOTALL).groups
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if groups is not None and found != groups:
        raise ValueError(f"must have exactly {groups} group in parentheses, found {found}")
    return value


class _Scorer(StrictModel):
    weight: float = 1.0
    """Factor in the sum."""
    name: str | None = Field(None, pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """Name of this component in metrics; default: its type."""

    @property
    def budget_s(self) -> float:
        """Seconds that the scorer may take by its own limits; 0 where only `reward.timeout_s` bounds it."""
        return 0.0


class ExactScorer(_Scorer):
    """1 if the stripped completion equals the reference answer, else 0."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without regard to case."""


class MathScorer(_Scorer):
    """1 if the final answer is mathematically equal to the reference (library math-verify), else 0."""

    type: Literal["math"] = "math"


class FormatScorer(_Scorer):
    """1 if the whole completion matches a regular expression, else 0."""

    type: Literal["format"] = "format"
    pattern: str
    """Python regular expression; `.` matches newlines."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        return _pattern(value)


class FunctionScorer(_Scorer):
    """A Python function of the user: ``score(prompt, completion, answer, row, **args) -> float``."""

    type: Literal["function"] = "function"
    path: CodeName
    """`package.module:function`, importable by the reward service."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on each call."""


class CodeScorer(_Scorer):
    """Runs the Python program of a completion against the row's tests, in a sandbox: 1 if all pass, else 0."""

    type: Literal["code"] = "code"
    tests: str = Field("tests", min_length=1)
    """Field of the row that holds the tests: assertions, pairs of standard input and output, or calls."""
    partial: bool = False
    """Score the fraction of tests passed instead."""
    time_limit_s: float = Field(6.0, gt=0, le=600)
    """Wall-clock time for all tests of one completion; tests not finished by then have failed."""
    memory_bytes: int = Field(512 << 20, ge=64 << 20)
    """Address space of one process of the program."""
    scratch_bytes: int = Field(16 << 20, ge=4096)
    """Files in the program's private /tmp, all together; in memory, gone after each run."""
    output_bytes: int = Field(1 << 20, ge=1024)
    """A program that writes more than this is ended and has failed."""
    max_processes: int = Field(1, ge=1, le=256)
    """1: a program may start threads, no processes. More: processes and threads together, each with `memory_bytes`;
    needs namespaces."""
    site_packages: bool = False
    """Let programs import what is installed beside the reward service (numpy, ...), not only the standard library."""
    preload: list[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]] = Field(default_factory=list)
    """Modules imported once for all runs, such as `numpy`: programs find them ready."""

    @property
    def budget_s(self) -> float:
        """Its time limit."""
        return self.time_limit_s


class RewardModelScorer(_Scorer):
    """The output of a sequence classifier (Hugging Face directory) for prompt and completion."""

    type: Literal["reward_model"] = "reward_model"
    path: FileName
    """Directory with config, weights and tokenizer, as seen by the reward service."""
    format: Literal["chat", "plain"] = "chat"
    """`chat`: user and assistant turns in the tokenizer's chat template; `plain`: prompt and completion, joined."""
    messages: str | None = None
    """With `chat`: field of the row with the messages before the completion; null: the prompt is one user message."""
    label: int | None = Field(None, ge=0)
    """Which output to use; needed where the model has more than one."""
    output: Literal["logit", "probability"] = "logit"
    """`probability`: sigmoid of the only output, or softmax over several."""
    batch_size: int = Field(16, ge=1)
    """Completions of one forward pass."""
    max_tokens: int = Field(4096, ge=1)
    """A longer text fails: it is never cut in silence."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where torch sees one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights while computing."""
    threads: int = Field(1, ge=1)
    """torch threads of each scorer process on a CPU."""


class JudgeScorer(_Scorer):
    """A grade from a language model behind an OpenAI-compatible endpoint, mapped to 0..1."""

    type: Literal["judge"] = "judge"
    base_url: WebAddress
    """Address up to and with `/v1`; `/chat/completions` is added."""
    model: str = Field(min_length=1)
    """Model name in the request."""
    template: str = Field(min_length=1)
    """User message: a format string over `prompt`, `completion`, `answer` and the row's fields."""
    system: str | None = None
    """System message before it."""
    pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group: the grade. Its last match counts. Not used with `json_schema`."""
    json_schema: dict[str, Any] | None = None
    """Ask for JSON of this schema (`response_format`) and read the grade from `json_field`."""
    json_field: str = "score"
    """Field of that JSON object with the grade."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest grade, mapped to 0 and 1; a grade outside fails."""
    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature; null leaves it out, for models that refuse it."""
    max_tokens: int | None = Field(512, ge=1)
    """Longest reply; null leaves it out."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, for example `seed` or `max_completion_tokens`."""
    api_key_env: VariableName | None = None
    """NAME of the environment variable of the reward service that holds the key."""
    concurrency: int = Field(8, ge=1, le=256)
    """Requests at once of each scorer process."""
    timeout_s: float = Field(30.0, gt=0, le=3600)
    """Limit of one request; then it is tried again while the deadline allows."""
    deadline_s: float = Field(60.0, gt=0, le=3600)
    """Limit for all completions of a group, retries included."""
    cache: bool = True
    """Remember replies by model and request: in Redis or Valkey where the service has one, else in memory."""

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, value: str) -> str:
        return _pattern(value, groups=1)

    @model_validator(mode="after")
    def _rising_scale(self) -> JudgeScorer:
        if self.scale[0] >= self.scale[1]:
            raise ValueError("scale: the lowest grade must be smaller than the highest")
        fixed = {"model", "messages", "stream", "n"} & self.request.keys()
        if fixed:
            raise ValueError(f"request: {', '.join(sorted(fixed))} cannot be set there")
        return self

    @property
    def budget_s(self) -> float:
        """Its deadline."""
        return self.deadline_s


class HttpScorer(_Scorer):
    """Scores from a web service of the user, by POST (docs/rewards.md has the messages)."""

    type: Literal["http"] = "http"
    url: WebAddress
    """Where requests go."""
    batch_size: int = Field(64, ge=1)
    """Most completions of one request; larger groups are split."""
    send_row: bool = True
    """Send the data row along."""
    api_key_env: VariableName | None = None
    """NAME of an environment variable of the reward service; its value is sent as bearer token."""
    secret_env: VariableName | None = None
    """NAME of an environment variable of the reward service; requests are signed with it (HMAC-SHA256)."""
    concurrency: int = Field(8, ge=1, le=256)
    """Requests at once of each scorer process."""
    timeout_s: float = Field(5.0, gt=0, le=3600)
    """Limit of one request."""
    deadline_s: float = Field(8.0, gt=0, le=3600)
    """Limit for all completions of a group, retries included."""

    @property
    def budget_s(self) -> float:
        """Its deadline."""
        return self.deadline_s


class GraderScorer(_Scorer):
    """A grader in the format of OpenAI's fine-tuning API: string check, text similarity, Python, model, or several."""

    type: Literal["grader"] = "grader"
    grader: Grader
    """The grader. `item` is the data row, `sample.output_text` the completion, `sample.output_json` its JSON."""
    base_url: WebAddress | None = None
    """Address up to and with `/v1` where the models of `score_model` graders are asked."""
    api_key_env: VariableName | None = None
    """NAME of the environment variable of the reward service that holds the key for that."""
    concurrency: int = Field(8, ge=1, le=256)
    """Requests to models at once of each scorer process."""
    timeout_s: float = Field(30.0, gt=0, le=3600)
    """Limit of one request to a model; then it is tried again while the deadline allows."""
    time_limit_s: float = Field(6.0, gt=0, le=600)
    """Wall-clock limit of a Python grader for one completion."""
    deadline_s: float = Field(8.0, gt=0, le=3600)
    """Limit for all completions of a group."""

    @model_validator(mode="after")
    def _models_have_an_address(self) -> GraderScorer:
        if self.base_url is None and any(isinstance(p, ScoreModelGrader) for p in parts_of(self.grader).values()):
            raise ValueError("base_url: a score_model grader needs the address where its model is asked")
        return self

    @property
    def budget_s(self) -> float:
        """Its deadline."""
        return self.deadline_s


class EnvironmentScorer(_Scorer):
    """The environment's own verdict on an episode: the rewards of a task of `verifiers`, or `reward(answer)` of the
    object behind tools of type `method`. Where several objects judge, the sum."""

    type: Literal["environment"] = "environment"


ScorerConfig = Annotated[
    ExactScorer
    | MathScorer
    | FormatScorer
    | FunctionScorer
    | CodeScorer
    | RewardModelScorer
    | JudgeScorer
    | HttpScorer
    | GraderScorer
    | EnvironmentScorer,
    Field(discriminator="type"),
]
