"""Tool that runs programs of the policy, in the sandbox that the code scorer also uses."""

from __future__ import annotations

from typing import Any

from penstock.services.env.tools.base import CallError
from penstock.shared.config.tools import PythonTool
from penstock.shared.errors import SandboxError, ToolError
from penstock.shared.sandbox.plan import Job
from penstock.shared.sandbox.sandbox import Sandbox

__all__ = ["Python"]

_DRIVER = """
import sys, traceback
try:
    exec(compile({source!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    sys.stdout.flush()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program.py"]
    print(f"line {{lines[-1]}}: " * bool(lines) + "".join(traceback.format_exception_only(error)).strip())
    sys.exit(1)
"""
"""Wrapper that prints exceptions of the program, because the sandbox hides them and the policy learns from them."""


class Python:
    """Runs programs: ``{"code": "print(6 * 7)"}`` returns 42."""

    def __init__(self, config: PythonTool) -> None:
        """Start the sandbox. Raises ToolError if this machine supports no sandbox."""
        self._config = config
        try:
            self._sandbox = Sandbox(config)
        except SandboxError as error:
            raise ToolError(str(error)) from None

    def call(self, arguments: dict[str, Any]) -> str:
        """Run the program and return its output.

        Raises:
            CallError: the program failed, or exceeded its time or output limit; the text includes its output.
            ToolError: the sandbox failed.
        """
        job = Job(_DRIVER.format(source=str(arguments["code"])), [], "")
        try:
            outcome = self._sandbox.run(job, "", self._config.time_limit_s)
        except SandboxError as error:
            raise ToolError(str(error)) from None
        text = outcome.stdout.decode(errors="replace").rstrip("\n")
        if outcome.ok:
            return text or "(no output)"
        kind, number = outcome.verdict
        if outcome.flooded:
            problem = f"the program wrote more than {self._config.output_bytes} bytes"
        elif kind == "time":
            problem = f"the program took longer than {self._config.time_limit_s:g} s"
        elif kind == "signal":
            problem = f"the program was ended by signal {number}"
        else:
            problem = "" if text else f"the program exited with status {number}"
        raise CallError("\n".join(filter(None, [text, problem])))

    def close(self) -> None:
        """Close the sandbox."""
        self._sandbox.close()
