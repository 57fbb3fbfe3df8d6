"""Episodes of several turns: the tools that a policy may call, and how calls and results are written as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

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


class CallFormat(StrictModel):
    """How the policy writes a call; what stands between the markers is its body."""

    begin: str = Field("<tool_call>", min_length=1, max_length=64)
    """Marker before a call."""
    end: str = Field("</tool_call>", min_length=1, max_length=64)
    """Marker after it."""
    body: Literal["json", "text"] = "json"
    """`json`: `{"name": ..., "arguments": {...}}`; `text`: the argument of the only tool, as it stands."""
    parallel: bool = True
    """A turn goes on to an end-of-sequence token and may hold several calls, which run at once; false: it ends with
    its first call."""
    max_calls: int = Field(8, ge=1, le=64)
    """Most calls of one turn; where there are more, none is carried out and the policy is told."""

    @model_validator(mode="after")
    def _markers_differ(self) -> CallFormat:
        if self.begin in self.end or self.end in self.begin:
            raise ValueError(f"begin and end: one of '{self.begin}' and '{self.end}' is part of the other")
        return self


class ObservationFormat(StrictModel):
    """Format of what the policy reads after its calls. Results never hold special tokens of the tokenizer."""

    before: str = ""
    """Before the results of a turn, for example the end of the turn in a chat format."""
    result: str = "{result}"
    """Each result, in the order of the calls."""
    after: str = ""
    """After the last one."""

    @field_validator("result")
    @classmethod
    def _holds_the_result(cls, value: str) -> str:
        if value.count("{result}") != 1:
            raise ValueError("must hold {result} once")
        return value


class EpisodeConfig(StrictModel):
    """Bounds of every environment."""

    max_turns: int = Field(4, ge=1, le=64)
    """Turns of the policy in one episode; what it asks for in the last one is not carried out, and the episode counts
    as cut off. `sampling.max_new_tokens` bounds what the policy writes in all turns together."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest turn in tokens; an episode with a longer one is cut off."""
    max_observation_tokens: int = Field(256, ge=1)
    """Longest observation of one turn in tokens. Longer results of tools are cut, each to the same length; an episode
    whose environment says more than this is cut off."""
    turn_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Time for one turn from the moment at which the engine begins it, with what the environment does then; an episode
    that takes longer has failed. Time in which the environment is asked again, because no env worker answered or had
    room, does not count."""
    idle_timeout_s: float = Field(600.0, gt=0, le=86400)
    """The state of an episode that nobody has used for so long is given up; an episode that goes on then is begun
    again, as where its env worker died (`restarts`)."""
    restarts: int = Field(1, ge=0, le=8)
    """How often an episode whose env worker died, and with it its state, is begun again from its first turn; after that
    it has failed."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI's API describe them, as far as the job file knows them."""
        return []

    @property
    def gives_rewards(self) -> bool:
        """True if an episode has a reward of its environment's own, for the scorer `environment`."""
        return False


class EnvironmentConfig(EpisodeConfig):
    """Episodes in which the policy calls tools of the env service and reads what they answer."""

    type: Literal["tools"] = "tools"
    """Kind of environment."""
    tools: list[ToolConfig] = Field(min_length=1, max_length=16)
    """Tools that may be called."""
    calls: CallFormat = CallFormat()
    """How calls are written."""
    observations: ObservationFormat = ObservationFormat()
    """How results are written."""
    tool_timeout_s: float = Field(10.0, gt=0, le=600)
    """Time for one call once an env worker has it."""
    on_tool_failure: Literal["fail", "observe"] = "fail"
    """A tool that breaks or takes too long: the trajectory has failed, is counted and never trained; or the policy is
    told. Mistakes of the policy (a wrong expression, a program that raises) are always told. Where the object of a
    `method` is lost with its process, the trajectory has failed in any case."""
    scored: Literal["answer", "transcript"] = "answer"
    """The completion as scorers see it: the last turn, or everything after the prompt."""

    @model_validator(mode="after")
    def _tools_can_be_told_apart(self) -> EnvironmentConfig:
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
        """Results that the policy may read after one turn."""
        return self.calls.max_calls if self.calls.parallel else 1

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI's API describe them."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self.tools
        ]

    @property
    def stateful(self) -> frozenset[str]:
        """Names of tools that keep state in an episode."""
        return frozenset(tool.name for tool in self.tools if isinstance(tool, MethodTool))

    @property
    def request_timeout_s(self) -> float:
        """For one call."""
        return self.tool_timeout_s

    @property
    def gives_rewards(self) -> bool:
        """Objects may judge their episode."""
        return any(isinstance(tool, MethodTool) for tool in self.tools)


class VerifiersConfig(EpisodeConfig):
    """An environment of the library `verifiers`: its tasks, its turns and tools, its rewards."""

    type: Literal["verifiers"] = "verifiers"
    """Kind of environment."""
    env: dict[str, Any]
    """The library's own configuration of an environment, with at least `taskset: {id: ...}`. Roles that name none get
    the harness `penstock-chat`, which calls tools and needs no program of its own, and the runtime `subprocess`."""
    python: Annotated[str | None, "code"] = Field(None, pattern=r"^/")
    """Interpreter in which the library and the environment are installed, as the env service sees it; null: that of the
    env service (`pip install penstock[verifiers]`)."""
    max_episodes: int = Field(32, ge=1, le=1024)
    """Episodes of one env worker at once; others wait."""
    step_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Time that the environment may take to begin an episode, to answer a turn, or to score the episode."""

    @field_validator("env")
    @classmethod
    def _names_a_taskset(cls, value: dict[str, Any]) -> dict[str, Any]:
        taskset = value.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str) or not taskset["id"]:
            raise ValueError("needs `taskset: {id: ...}`, the name of a taskset of verifiers")
        return value

    @model_validator(mode="after")
    def _a_turn_holds_a_step(self) -> VerifiersConfig:
        if self.step_timeout_s > self.turn_timeout_s:
            raise ValueError("step_timeout_s is longer than turn_timeout_s")
        return self

    @property
    def request_timeout_s(self) -> float:
        """For one step."""
        return self.step_timeout_s

    @property
    def gives_rewards(self) -> bool:
        """Its tasks judge."""
        return True


def _tools_unless_named(data: Any) -> Any:
    return {"type": "tools", **data} if isinstance(data, dict) else data


AnyEnvironment = Annotated[
    Annotated[EnvironmentConfig | VerifiersConfig, Field(discriminator="type")], BeforeValidator(_tools_unless_named)
]


def completion_tokens(sampling: SamplingConfig, environment: EpisodeConfig | None) -> int:
    """Upper bound of the tokens after a prompt: those of the policy, and what it is told between its turns."""
    if environment is None:
        return sampling.max_new_tokens
    return sampling.max_new_tokens + (environment.max_turns - 1) * environment.max_observation_tokens


def room_of(sampling: SamplingConfig, environment: EpisodeConfig | None, key: str = "sampling") -> str:
    """Keys that the length of a completion follows from, for messages; with their values where there are several."""
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
    """Raise ValueError where completions do not fit into the model, or into turns; ``key`` is where sampling stands."""
    if environment is not None and sampling.min_new_tokens:
        raise ValueError(f"{key}.min_new_tokens: a turn ends with its call; leave it out")
    if environment is not None and sampling.ignore_eos:
        raise ValueError(f"{key}.ignore_eos: a turn ends with the end of sequence; leave it out")
    model.check_room(room_of(sampling, environment, key), completion_tokens(sampling, environment))


def check_environment(environment: EpisodeConfig | None, reward: RewardConfig, sources: Iterable[Source]) -> None:
    """Raise ValueError where rows or scorers need another environment than there is."""
    wanted = isinstance(environment, VerifiersConfig)
    for source in sources:
        if isinstance(source, TasksSource) != wanted:
            raise ValueError(
                "environment.type 'verifiers' brings its own tasks: give it sources of type 'tasks', and only them"
                if wanted
                else "a source of type 'tasks' needs environment.type 'verifiers'"
            )
    judged = any(isinstance(scorer, EnvironmentScorer) for scorer in reward.scorers)
    if judged and not (environment is not None and environment.gives_rewards):
        raise ValueError("scorer 'environment' needs an environment that judges: type 'verifiers', or a tool 'method'")
