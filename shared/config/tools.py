"""Tools of episodes: their configuration, and the description and schema that the policy reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.shared.config.base import CodeName, StrictModel

__all__ = ["CalculatorTool", "FunctionTool", "MethodTool", "PythonTool", "ToolConfig"]

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


class CalculatorTool(StrictModel):
    """Calculator: `+ - * / ^ %`, parentheses, decimal numbers; exact, with the result as a decimal number."""

    type: Literal["calculator"] = "calculator"
    name: ToolName = "calculator"
    """Name of the tool in calls."""
    decimals: int = Field(4, ge=0, le=12)
    """Largest number of decimal places of a result."""

    @property
    def description(self) -> str:
        """Description for the policy."""
        return "Evaluates an arithmetic expression."

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return _one_text("expression", "for example 48/(2+4)")


class PythonTool(StrictModel):
    """Executes a Python program in a sandbox and returns its output; no state is kept between calls."""

    type: Literal["python"] = "python"
    name: ToolName = "python"
    """Name of the tool in calls."""
    time_limit_s: float = Field(4.0, gt=0, le=600)
    """Wall-clock limit of a program (seconds); a slower program is killed, and the policy reads an error."""
    memory_bytes: int = Field(512 << 20, ge=64 << 20)
    """Address space of each process of the program (bytes)."""
    scratch_bytes: int = Field(16 << 20, ge=4096)
    """Total size of files in the program's private /tmp (bytes); held in memory and removed after each run."""
    output_bytes: int = Field(1 << 16, ge=1024, le=1 << 18)
    """Largest output (bytes); a program that writes more is killed."""
    max_processes: int = Field(1, ge=1, le=256)
    """Largest number of processes and threads of a program; 1: it may start threads but no processes. More than 1 needs
    namespaces."""
    site_packages: bool = False
    """Allow imports of packages installed beside the env service, not only of the standard library."""
    preload: list[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]] = Field(default_factory=list)
    """Modules such as `numpy` to import once for all runs, so that programs start faster."""

    @property
    def description(self) -> str:
        """Description for the policy."""
        return "Runs a Python program and returns what it prints."

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return _one_text("code", "a whole program")


class _UserTool(StrictModel):
    name: ToolName
    """Name of the tool in calls."""
    description: str = Field(min_length=1)
    """Description for the policy."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments. Calls without a `required` argument, or with an unknown one, are errors."""

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
    """Python function of the user. The result of ``function(**arguments)`` is passed on as text, or as JSON if it is
    not a string.

    A ValueError means that the call was wrong, and is shown to the policy. Any other exception is a failure of the
    tool.
    """

    type: Literal["function"] = "function"
    path: CodeName
    """`package.module:function`, importable by the env service."""


class MethodTool(_UserTool):
    """Method of an object that lives as long as its episode, so that it can keep state between the calls of the
    episode.

    Methods with the same ``path`` share one object. Results and errors are handled as for a function.
    """

    type: Literal["method"] = "method"
    path: CodeName
    """`package.module:Class`, importable by the env service. Each episode has its own object, created by
    `Class(seed=..., row=...)`; the seed derives from the job's and is the same for all episodes of a draw."""
    method: str = Field("", pattern=r"^([A-Za-z]\w*)?$")
    """Name of the method; empty: the same as `name`."""


def _one_text(name: str, description: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": description}}
    return {"type": "object", "properties": properties, "required": [name]}


ToolConfig = Annotated[CalculatorTool | PythonTool | FunctionTool | MethodTool, Field(discriminator="type")]
