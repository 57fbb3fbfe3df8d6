"""Tools of the env service.

To add one: a config class in ``shared/config/tools.py``, a module here, and a line in ``open_tool``.
"""

from __future__ import annotations

from penstock.services.env.tools.base import CallError, Tool
from penstock.services.env.tools.calculator import Calculator
from penstock.services.env.tools.function import Function
from penstock.shared.config.tools import CalculatorTool, FunctionTool, MethodTool, ToolConfig

__all__ = ["CallError", "Tool", "open_tool"]


def open_tool(config: ToolConfig) -> Tool:
    """Open the tool that ``config`` describes. This may run user code: call it in a process that can be killed.

    Raises:
        ToolError: the tool cannot be opened; the text says what to do.
    """
    if isinstance(config, CalculatorTool):
        return Calculator(config)
    if isinstance(config, FunctionTool):
        return Function(config)
    assert not isinstance(config, MethodTool), "a method belongs to an episode: see objects.py"
    from penstock.services.env.tools.python import Python

    return Python(config)
