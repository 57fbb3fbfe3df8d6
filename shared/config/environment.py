"""Episodes of several turns: the tools that a policy may call, and how calls and results are written as text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.sampling import SamplingConfig

__all__ = [
    "CalculatorTool",
    "CallFormat",
    "EnvironmentConfig",
    "FunctionTool",
    "ObservationFormat",
    "PythonTool",
    "ToolConfig",
    "check_completions",
    "completion_tokens",
]

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


class CalculatorTool(StrictModel):
    """Arithmetic: `+ - * / ^ %`, parentheses, decimal numbers; exact, written as a decimal number."""

    type: Literal["calculator"] = "calculator"
    name: ToolName = "calculator"
    """Its name in calls."""
    decimals: int = Field(4, ge=0, le=12)
    """Most digits after the point of a result."""

    @property
    def description(self) -> str:
        """For the policy."""
        return "Evaluates an arithmetic expression."

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return _one_text("expression", "for example 48/(2+4)")


class PythonTool(StrictModel):
    """Runs a Python program in a sandbox and shows what it prints; nothing is kept between calls."""

    type: Literal["python"] = "python"
    name: ToolName = "python"
    """Its name in calls."""
    time_limit_s: float = Field(4.0, gt=0, le=600)
    """Wall-clock time of a program; one that takes longer is ended, and the policy is told."""
    memory_bytes: int = Field(512 << 20, ge=64 << 20)
    """Address space of one process of the program."""
    scratch_bytes: int = Field(16 << 20, ge=4096)
    """Files in the program's private /tmp, all together; in memory, gone after each run."""
    output_bytes: int = Field(1 << 16, ge=1024, le=1 << 18)
    """A program that writes more than this is ended."""
    max_processes: int = Field(1, ge=1, le=256)
    """1: a program may start threads, no processes. More needs namespaces."""
    site_packages: bool = False
    """Let programs import what is installed beside the env service, not only the standard library."""
    preload: list[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]] = Field(default_factory=list)
    """Modules imported once for all runs, such as `numpy`: programs find them ready."""

    @property
    def description(self) -> str:
        """For the policy."""
        return "Runs a Python program and returns what it prints."

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return _one_text("code", "a whole program")


class FunctionTool(StrictModel):
    """A Python function of the user: what ``function(**arguments)`` returns, as it is if text, else as JSON.

    A ValueError that it raises is told to the policy: its call was wrong. Anything else breaks the tool.
    """

    type: Literal["function"] = "function"
    name: ToolName
    """Its name in calls."""
    path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, importable by the env service."""
    description: str = Field(min_length=1)
    """What it does, for the policy."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, for the policy; `required` ones must be there, others that it does not know not."""

    @field_validator("parameters")
    @classmethod
    def _is_an_object(cls, value: dict[str, Any]) -> dict[str, Any]:
        properties, required = value.get("properties", {}), value.get("required", [])
        if value.get("type") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("must be a JSON schema of type 'object' with 'properties' and perhaps 'required'")
        if unknown := [name for name in required if name not in properties]:
            raise ValueError(f"required names {unknown}, which are no properties")
        return value


def _one_text(name: str, description: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": description}}
    return {"type": "object", "properties": properties, "required": [name]}


ToolConfig = Annotated[CalculatorTool | PythonTool | FunctionTool, Field(discriminator="type")]


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
    """What the policy reads after its calls. Results never hold special tokens of the tokenizer."""

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


class EnvironmentConfig(StrictModel):
    """Episodes in which the policy calls tools of the env service and reads what they answer."""

    type: Literal["tools"] = "tools"
    """What kind of environment this is."""
    tools: list[ToolConfig] = Field(min_length=1, max_length=16)
    """What may be called."""
    calls: CallFormat = CallFormat()
    """How calls are written."""
    observations: ObservationFormat = ObservationFormat()
    """How results are written."""
    max_turns: int = Field(4, ge=1, le=64)
    """Turns of the policy in one episode; a call in the last one is not carried out, and the episode counts as cut
    off. `sampling.max_new_tokens` bounds what the policy writes in all turns together."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest turn in tokens; an episode with a longer one is cut off."""
    max_observation_tokens: int = Field(256, ge=1)
    """Longest observation of one turn in tokens; longer results are cut, each to the same length."""
    turn_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Time for one turn, its calls included; an episode that takes longer has failed. Time in which a call is asked for
    again, because no env worker answered or had room, does not count."""
    tool_timeout_s: float = Field(10.0, gt=0, le=600)
    """Time for one call once an env worker has it."""
    on_tool_failure: Literal["fail", "observe"] = "fail"
    """A tool that breaks or takes too long: the trajectory has failed, is counted and never trained; or the policy is
    told. Mistakes of the policy (a wrong expression, a program that raises) are always told."""
    scored: Literal["answer", "transcript"] = "answer"
    """What scorers see as the completion: the last turn, or everything after the prompt."""

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


def completion_tokens(sampling: SamplingConfig, environment: EnvironmentConfig | None) -> int:
    """Upper bound of the tokens after a prompt: those of the policy, and what it is told between its turns."""
    if environment is None:
        return sampling.max_new_tokens
    return sampling.max_new_tokens + (environment.max_turns - 1) * environment.max_observation_tokens


def check_completions(
    model: ModelConfig, key: str, sampling: SamplingConfig, environment: EnvironmentConfig | None
) -> None:
    """Raise ValueError where completions do not fit into the model, or into turns; ``key`` is where sampling stands."""
    if environment is not None and sampling.min_new_tokens:
        raise ValueError(f"{key}.min_new_tokens: a turn ends with its call; leave it out")
    where = f"{key}.max_new_tokens" + (" with environment.max_observation_tokens" if environment else "")
    model.check_room(where, completion_tokens(sampling, environment))
