"""The tools of episodes: what each takes, and what of it is told to the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.shared.config.base import CodeName, StrictModel

__all__ = ["CalculatorTool", "FunctionTool", "MethodTool", "PythonTool", "ToolConfig"]

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


class _UserTool(StrictModel):
    name: ToolName
    """Its name in calls."""
    description: str = Field(min_length=1)
    """Description of the tool, for the policy."""
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


class FunctionTool(_UserTool):
    """A Python function of the user: what ``function(**arguments)`` returns, as it is if text, else as JSON.

    A ValueError that it raises is told to the policy: its call was wrong. Anything else breaks the tool.
    """

    type: Literal["function"] = "function"
    path: CodeName
    """`package.module:function`, importable by the env service."""


class MethodTool(_UserTool):
    """A method of an object that lives as long as an episode: what it keeps is there in the episode's next calls.

    Methods with the same ``path`` belong to the same object. Results and errors are as those of a function.
    """

    type: Literal["method"] = "method"
    path: CodeName
    """`package.module:Class`, importable by the env service. One object is made for each episode, as
    `Class(seed=..., row=...)`: the seed is the same for all episodes of a draw, and follows from the job's."""
    method: str = Field("", pattern=r"^([A-Za-z]\w*)?$")
    """Its method; empty: as `name`."""


def _one_text(name: str, description: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": description}}
    return {"type": "object", "properties": properties, "required": [name]}


ToolConfig = Annotated[CalculatorTool | PythonTool | FunctionTool | MethodTool, Field(discriminator="type")]
