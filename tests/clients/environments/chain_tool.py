"""A tool with state, whose results lead the chain to its other words."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Calls(vf.State):
    """State of one episode."""

    sums: tuple[int, ...] = ()


class Add(vf.Toolset[vf.ToolsetConfig, Calls]):
    """Server of one tool."""

    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds."""
        self.state.sums = (*self.state.sums, a + b)
        return "hi" if len(self.state.sums) == 1 else "tool"


class Adding(vf.Task[vf.TaskData, Calls]):
    """Task that rewards one tool call followed by an answer."""

    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        """Return 0.75 for exactly one right call, plus 0.25 for the answer."""
        return 0.75 * (trace.state.sums == (3,)) + 0.25 * (trace.last_reply == "hello world and more")

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the server of the tool."""
        return [Add(vf.ToolsetConfig())]


class ToolTaskset(vf.Taskset[Adding]):
    """Set of one task."""

    def load(self) -> Iterable[Adding]:
        """Yield the task."""
        yield Adding(vf.TaskData(prompt="tool"), self.config.task)


if __name__ == "__main__":
    Add.run()
