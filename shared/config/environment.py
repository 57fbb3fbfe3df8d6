"""Multi-turn episodes: the tools that a policy may call, and how calls and results are written as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.data import Source, TasksSource
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rewards.scorers import EnvironmentScorer
from penstock.shared.config.sampling import SamplingConfig
from penstock.shared.config.tools import MethodTool, PythonTool, ToolConfig

__all__ = [
    "AnyEnvironment",
    "CallFormat",
    "EnvironmentConfig",
    "EpisodeConfig",
    "ObservationFormat",
    "VerifiersConfig",
    "check_completions",
    "check_environment",
    "completion_tokens",
    "room_of",
]

_UPLOADED = re.compile(r"[A-Za-z_]\w*@[0-9a-f]{64}")


class CallFormat(StrictModel):
    """Text format of a tool call: markers and the body between them."""

    begin: str = Field("<tool_call>", min_length=1, max_length=64)
    """Marker before a call."""
    end: str = Field("</tool_call>", min_length=1, max_length=64)
    """Marker after a call."""
    body: Literal["json", "text"] = "json"
    """`json`: `{"name": ..., "arguments": {...}}`; `text`: the argument of the only tool, verbatim."""
    parallel: bool = True
    """True: a turn continues to an end-of-sequence token and may contain several calls, which run concurrently. False:
    a turn ends with its first call."""
    max_calls: int = Field(8, ge=1, le=64)
    """Largest number of calls per turn; if a turn has more, none is executed and the policy reads an error."""

    @model_validator(mode="after")
    def _markers_differ(self) -> CallFormat:
        if self.begin in self.end or self.end in self.begin:
            raise ValueError(f"begin and end: one of '{self.begin}' and '{self.end}' is part of the other")
        return self


class ObservationFormat(StrictModel):
    """Text format of the results that the policy reads after its calls. Results never contain special tokens of the
    tokenizer."""

    before: str = ""
    """Text before the results of a turn, for example the end of the turn in a chat format."""
    result: str = "{result}"
    """Format string of each result, in the order of the calls."""
    after: str = ""
    """Text after the last result."""

    @field_validator("result")
    @classmethod
    def _holds_the_result(cls, value: str) -> str:
        if value.count("{result}") != 1:
            raise ValueError("must hold {result} once")
        return value


class EpisodeConfig(StrictModel):
    """Limits of an episode; every type of environment has these keys."""

    max_turns: int = Field(4, ge=1, le=64)
    """Most turns of the policy per episode; calls in the last turn are not executed, and the episode counts as
    truncated. `sampling.max_new_tokens` limits what the policy writes in all turns together."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest turn in tokens; an episode with a longer turn is truncated. null: no limit."""
    max_observation_tokens: int = Field(256, ge=1)
    """Longest observation per turn in tokens. Longer tool results are cut, each to the same length; an episode whose
    environment returns more than this is truncated."""
    turn_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Time limit of one turn (seconds), from its start in the engine, including the environment's work; an episode
    that exceeds it fails. Time spent on retries because no env worker answered or had capacity does not count."""
    idle_timeout_s: float = Field(600.0, gt=0, le=86400)
    """Idle time (seconds) after which an env worker discards the state of an episode; an episode that continues
    later is restarted, as if its env worker had died (`restarts`)."""
    restarts: int = Field(1, ge=0, le=8)
    """Largest number of restarts of an episode. An episode whose env worker died begins again with its first turn,
    because its state is lost; it fails if no restart is left."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Tool schemas that the job file defines, in the format of chat templates and OpenAI's API."""
        return []

    @property
    def gives_rewards(self) -> bool:
        """True if the environment itself returns a reward for each episode, for the scorer `environment`."""
        return False


class EnvironmentConfig(EpisodeConfig):
    """Episodes in which the policy calls tools of the env service and reads their results."""

    type: Literal["tools"] = "tools"
    """Kind of environment."""
    tools: list[ToolConfig] = Field(min_length=1, max_length=16)
    """Tools that the policy may call."""
    calls: CallFormat = CallFormat()
    """Format of calls."""
    observations: ObservationFormat = ObservationFormat()
    """Format of results."""
    tool_timeout_s: float = Field(10.0, gt=0, le=600)
    """Time limit of one call (seconds), from when an env worker takes it."""
    on_tool_failure: Literal["fail", "observe"] = "fail"
    """Handling of a tool that raises or times out. `fail`: the trajectory fails, is counted and never trained on;
    `observe`: the policy reads the error. Mistakes of the policy (a wrong expression, a program that raises) are
    always observations. The trajectory always fails if the process with the object of a tool of type `method` ends."""
    scored: Literal["answer", "transcript"] = "answer"
    """Text that scorers see as the completion: `answer`, the last turn; `transcript`, everything after the prompt."""

    @model_validator(mode="after")
    def _tools_are_distinct(self) -> EnvironmentConfig:
        names = [tool.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools: {', '.join(twice)}: names must differ")
        if self.calls.body == "text":
            if len(self.tools) > 1:
                raise ValueError("calls.body: 'text' does not say which tool is meant: give one tool, or use 'json'")
            if not self.tools[0].parameters["properties"]:
                raise ValueError(f"calls.body: 'text' needs a tool with an argument; '{names[0]}' has none")
        slow = [t.name for t in self.tools if isinstance(t, PythonTool) and t.time_limit_s >= self.tool_timeout_s]
        if slow:
            raise ValueError(f"tool_timeout_s {self.tool_timeout_s:g} must be above the time_limit_s of {slow[0]}")
        if self.tool_timeout_s > self.turn_timeout_s:
            raise ValueError("tool_timeout_s is longer than turn_timeout_s")
        if self.max_observation_tokens < self.most_results:
            raise ValueError(
                f"max_observation_tokens {self.max_observation_tokens} leaves no room for the results of "
                f"{self.most_results} calls in one turn (calls.max_calls)"
            )
        return self

    @property
    def most_results(self) -> int:
        """Largest number of results that the policy reads after one turn."""
        return self.calls.max_calls if self.calls.parallel else 1

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Tool schemas in the format of chat templates and OpenAI's API."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self.tools
        ]

    @property
    def stateful(self) -> frozenset[str]:
        """Names of tools that keep state during an episode."""
        return frozenset(tool.name for tool in self.tools if isinstance(tool, MethodTool))

    @property
    def request_timeout_s(self) -> float:
        """Time limit of one call (seconds)."""
        return self.tool_timeout_s

    @property
    def gives_rewards(self) -> bool:
        """True if a tool is a method of an object (type `method`), because such an object may return a reward for its
        episode."""
        return any(isinstance(tool, MethodTool) for tool in self.tools)


def _uploaded_taskset(value: str | None) -> str | None:
    if value is None:
        return None
    if not _UPLOADED.fullmatch(value):
        raise ValueError(
            f"found '{value[:80]}'; must be ./FILE.py, a module with a taskset, which `penstock submit` and "
            "Client.submit upload and name by FILE@SHA256"
        )
    stem = value.partition("@")[0]
    if stem in sys.stdlib_module_names or stem == "verifiers":
        raise ValueError(f"{stem}.py would hide the module '{stem}': give the file another name")
    return value


class VerifiersConfig(EpisodeConfig):
    """Environment of the library `verifiers`, which defines tasks, turns, tools and rewards."""

    type: Literal["verifiers"] = "verifiers"
    """Kind of environment."""
    path: Annotated[str | None, AfterValidator(_uploaded_taskset), "code"] = None
    """File of the taskset, `./my_taskset.py`, relative to the job file and uploaded with it; null: the taskset is an
    installed package."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the environment in the format of `verifiers`; without `path`, `taskset: {id: ...}` is required.
    Agents without a harness and runtime get the harness `penstock-chat`, which calls tools and needs no program of its
    own, and the runtime `subprocess`."""
    python: Annotated[str | None, "code"] = Field(None, pattern=r"^/")
    """Path of the Python interpreter that has the library and the environment installed, as the env service sees it;
    null: the interpreter of the env service (`pip install penstock[verifiers]`)."""
    max_episodes: int = Field(32, ge=1, le=1024)
    """Concurrent episodes of one env worker; others wait."""
    step_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Time limit of each step of the environment (seconds): begin an episode, answer a turn, or score the episode."""

    @model_validator(mode="after")
    def _names_a_taskset(self) -> VerifiersConfig:
        taskset = self.env.get("taskset", {} if self.path else None)
        id = taskset.get("id", self.module) if isinstance(taskset, dict) else None
        if not isinstance(id, str) or not id:
            raise ValueError("env: needs `taskset: {id: ...}`, the name of a taskset of verifiers, or set path")
        if self.module and id.replace("-", "_") != self.module:
            raise ValueError(f"env.taskset.id: found '{id}', but path names {self.module}.py; leave the id out")
        return self

    @model_validator(mode="after")
    def _a_turn_holds_a_step(self) -> VerifiersConfig:
        if self.step_timeout_s > self.turn_timeout_s:
            raise ValueError("step_timeout_s is longer than turn_timeout_s")
        return self

    @property
    def module(self) -> str:
        """Name of the uploaded module; '' if the taskset is an installed package."""
        return (self.path or "").partition("@")[0]

    @property
    def complete(self) -> dict[str, Any]:
        """Settings of the environment: the field ``env``. If ``env`` gives no id of a taskset, the name of the uploaded
        module is added as this id."""
        return {**self.env, "taskset": {"id": self.module, **self.env.get("taskset", {})}}

    @property
    def request_timeout_s(self) -> float:
        """Time limit of one step (seconds)."""
        return self.step_timeout_s

    @property
    def gives_rewards(self) -> bool:
        """Always True: the tasks of `verifiers` return rewards."""
        return True


def _tools_unless_named(data: Any) -> Any:
    return {"type": "tools", **data} if isinstance(data, dict) else data


AnyEnvironment = Annotated[
    Annotated[EnvironmentConfig | VerifiersConfig, Field(discriminator="type")], BeforeValidator(_tools_unless_named)
]


def completion_tokens(sampling: SamplingConfig, environment: EpisodeConfig | None) -> int:
    """Return an upper bound of the tokens after a prompt: the policy's tokens plus the observations between its
    turns."""
    if environment is None:
        return sampling.max_new_tokens
    return sampling.max_new_tokens + (environment.max_turns - 1) * environment.max_observation_tokens


def room_of(sampling: SamplingConfig, environment: EpisodeConfig | None, key: str = "sampling") -> str:
    """Return the beginning of an error message about completions that are too long: the keys of the job file that limit
    their length. If there are several keys, the text includes their values. The caller appends the total in tokens."""
    if environment is None:
        return f"{key}.max_new_tokens"
    turns = environment.max_turns - 1
    return (
        f"{key}.max_new_tokens {sampling.max_new_tokens} + {turns} x environment.max_observation_tokens "
        f"{environment.max_observation_tokens} (environment.max_turns - 1) ="
    )


def check_completions(
    model: ModelConfig, key: str, sampling: SamplingConfig, environment: EpisodeConfig | None
) -> None:
    """Raise ValueError if the model's longest sequence has no room for the completions, or if an environment forbids a
    setting of ``sampling``. ``key`` is the name of the section ``sampling`` in the job file."""
    if environment is not None and sampling.min_new_tokens:
        raise ValueError(f"{key}.min_new_tokens: a turn ends with its call; leave it out")
    if environment is not None and sampling.ignore_eos:
        raise ValueError(f"{key}.ignore_eos: a turn ends with the end of sequence; leave it out")
    model.check_room(room_of(sampling, environment, key), completion_tokens(sampling, environment))


def check_environment(environment: EpisodeConfig | None, reward: RewardConfig, sources: Iterable[Source]) -> None:
    """Raise ValueError if a data source or a scorer needs another type of environment than the job has."""
    is_verifiers = isinstance(environment, VerifiersConfig)
    for source in sources:
        if isinstance(source, TasksSource) != is_verifiers:
            raise ValueError(
                "environment.type 'verifiers' brings its own tasks: give it sources of type 'tasks', and only them"
                if is_verifiers
                else "a source of type 'tasks' needs environment.type 'verifiers'"
            )
    judged = any(isinstance(scorer, EnvironmentScorer) for scorer in reward.scorers)
    if judged and not (environment is not None and environment.gives_rewards):
        raise ValueError("scorer 'environment' needs an environment that judges: type 'verifiers', or a tool 'method'")
