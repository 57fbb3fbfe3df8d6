"""Configuration of the scorers. Each scorer runs in a killable process of the reward service."""

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
    """Return the URL. Raises ValueError unless it is an http(s) URL without credentials."""
    try:
        parts = urlsplit(value)
        host, secret = parts.hostname, parts.password or parts.username
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"'{value}' is not an http:// or https:// URL with a host")
    if secret:
        raise ValueError("a URL in a job file must not hold a user or password: name an environment variable instead")
    return value.rstrip("/")


def _variable_name(value: str) -> str:
    """Return ``value`` if it is the name of an environment variable that may hold a key for an external service. Raises
    ValueError otherwise."""
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
    """Factor of the score in the reward."""
    name: str | None = Field(None, pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """Name of this component in metrics; default: the scorer's type."""

    @property
    def budget_s(self) -> float:
        """Longest time that the scorer's own limits let it take (seconds); 0: only `reward.timeout_s` limits it."""
        return 0.0


class ExactScorer(_Scorer):
    """1 if the stripped completion equals the reference answer, else 0."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Ignore case."""


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
    """Python function of the user: ``score(prompt, completion, answer, row, **args) -> float``."""

    type: Literal["function"] = "function"
    path: CodeName
    """`package.module:function`, importable by the reward service."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of each call."""


class CodeScorer(_Scorer):
    """Executes the Python program of a completion against the row's tests, in a sandbox: 1 if all pass, else 0."""

    type: Literal["code"] = "code"
    tests: str = Field("tests", min_length=1)
    """Field of the row with the tests: assertions, pairs of standard input and output, or calls."""
    partial: bool = False
    """Score the fraction of tests that pass, instead of 1 or 0."""
    time_limit_s: float = Field(6.0, gt=0, le=600)
    """Wall-clock limit for all tests of one completion (seconds); unfinished tests fail."""
    memory_bytes: int = Field(512 << 20, ge=64 << 20)
    """Address space of each process of the program (bytes)."""
    scratch_bytes: int = Field(16 << 20, ge=4096)
    """Total size of files in the program's private /tmp (bytes); held in memory and removed after each run."""
    output_bytes: int = Field(1 << 20, ge=1024)
    """Largest output (bytes); a program that writes more is killed and fails."""
    max_processes: int = Field(1, ge=1, le=256)
    """Largest number of processes and threads of a program; 1: it may start threads but no processes. More than 1 needs
    namespaces, and each process may use `memory_bytes`."""
    site_packages: bool = False
    """Allow imports of packages installed beside the reward service (numpy, ...), not only of the standard library."""
    preload: list[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]] = Field(default_factory=list)
    """Modules such as `numpy` to import once for all runs, so that programs start faster."""

    @property
    def budget_s(self) -> float:
        """Longest time that the tests of one completion may take (seconds)."""
        return self.time_limit_s


class RewardModelScorer(_Scorer):
    """Reward model: a sequence classifier (Hugging Face directory) applied to prompt and completion."""

    type: Literal["reward_model"] = "reward_model"
    path: FileName
    """Directory with config, weights and tokenizer, as seen by the reward service."""
    format: Literal["chat", "plain"] = "chat"
    """`chat`: user and assistant turns in the tokenizer's chat template; `plain`: prompt and completion,
    concatenated."""
    messages: str | None = None
    """With `chat`: field of the row with the messages before the completion; null: the prompt is one user message."""
    label: int | None = Field(None, ge=0)
    """Index of the output to use; required if the model has several."""
    output: Literal["logit", "probability"] = "logit"
    """`logit`, or `probability`: sigmoid of the only output, or softmax over several."""
    batch_size: int = Field(16, ge=1)
    """Completions per forward pass."""
    max_tokens: int = Field(4096, ge=1)
    """Longest input in tokens; a longer one fails and is never truncated silently."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` uses a GPU if torch finds one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of weights and computation."""
    threads: int = Field(1, ge=1)
    """torch threads of each scorer process on a CPU."""


class JudgeScorer(_Scorer):
    """LLM judge: a grade from a language model behind an OpenAI-compatible endpoint, mapped to 0..1."""

    type: Literal["judge"] = "judge"
    base_url: WebAddress
    """Base address, including `/v1`; `/chat/completions` is appended."""
    model: str = Field(min_length=1)
    """Model name in the request."""
    template: str = Field(min_length=1)
    """User message: a format string over `prompt`, `completion`, `answer` and the row's fields."""
    system: str | None = None
    """System message; null: none."""
    pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the grade; its last match counts. Ignored with `json_schema`."""
    json_schema: dict[str, Any] | None = None
    """JSON schema of the reply (`response_format`); the grade is read from `json_field`. null: plain text."""
    json_field: str = "score"
    """Field of the JSON reply with the grade."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest grade, which are mapped to 0 and 1; scoring fails if the grade is outside."""
    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature; null: not sent, for models that reject it."""
    max_tokens: int | None = Field(512, ge=1)
    """Longest reply in tokens; null: not sent."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the request, for example `seed` or `max_completion_tokens`."""
    api_key_env: VariableName | None = None
    """Name of the environment variable of the reward service that contains the API key."""
    concurrency: int = Field(8, ge=1, le=256)
    """Concurrent requests of each scorer process."""
    timeout_s: float = Field(30.0, gt=0, le=3600)
    """Timeout of one request (seconds); it is retried while the deadline allows."""
    deadline_s: float = Field(60.0, gt=0, le=3600)
    """Deadline for all completions of a group, retries included (seconds)."""
    cache: bool = True
    """Cache replies by model and request: in Redis or Valkey if the service has one, else in memory."""

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
        """Longest time that the requests for one group may take (seconds)."""
        return self.deadline_s


class HttpScorer(_Scorer):
    """Scores from a web service of the user, by POST (docs/rewards.md defines the messages)."""

    type: Literal["http"] = "http"
    url: WebAddress
    """Address of the requests."""
    batch_size: int = Field(64, ge=1)
    """Largest number of completions per request; larger groups are split."""
    send_row: bool = True
    """Include the data row in the request."""
    api_key_env: VariableName | None = None
    """Name of an environment variable of the reward service; its value is sent as bearer token."""
    secret_env: VariableName | None = None
    """Name of an environment variable of the reward service; its value signs requests (HMAC-SHA256)."""
    concurrency: int = Field(8, ge=1, le=256)
    """Concurrent requests of each scorer process."""
    timeout_s: float = Field(5.0, gt=0, le=3600)
    """Timeout of one request (seconds)."""
    deadline_s: float = Field(8.0, gt=0, le=3600)
    """Deadline for all completions of a group, retries included (seconds)."""

    @property
    def budget_s(self) -> float:
        """Longest time that the requests for one group may take (seconds)."""
        return self.deadline_s


class GraderScorer(_Scorer):
    """Grader in the format of OpenAI's fine-tuning API: string check, text similarity, Python, score by a model, or a
    formula over several graders."""

    type: Literal["grader"] = "grader"
    grader: Grader
    """Grader of each completion. In its slots, `item` is the data row, `sample.output_text` the completion,
    `sample.output_json` the completion parsed as JSON."""
    base_url: WebAddress | None = None
    """Base address, including `/v1`, of the models of `score_model` graders."""
    api_key_env: VariableName | None = None
    """Name of the environment variable of the reward service that contains the API key of `base_url`."""
    concurrency: int = Field(8, ge=1, le=256)
    """Concurrent requests that each scorer process sends to models."""
    timeout_s: float = Field(30.0, gt=0, le=3600)
    """Timeout of one request to a model (seconds); it is retried while the deadline allows."""
    time_limit_s: float = Field(6.0, gt=0, le=600)
    """Wall-clock limit of a Python grader for one completion (seconds)."""
    deadline_s: float = Field(8.0, gt=0, le=3600)
    """Deadline for all completions of a group (seconds)."""

    @model_validator(mode="after")
    def _models_have_an_address(self) -> GraderScorer:
        if self.base_url is None and any(isinstance(p, ScoreModelGrader) for p in parts_of(self.grader).values()):
            raise ValueError("base_url: a score_model grader needs the address where its model is asked")
        return self

    @property
    def budget_s(self) -> float:
        """Longest time that the grading of one group may take (seconds)."""
        return self.deadline_s


class EnvironmentScorer(_Scorer):
    """Reward that the environment itself returns. A task of `verifiers` has rewards of its own. For tools of type
    `method`, Penstock calls `reward(answer)` of the object that has the methods, and adds the rewards of several
    objects."""

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
