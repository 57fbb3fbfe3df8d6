"""A tool with state: what it answers sends the chain on to its other words."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Calls(vf.State):
    """Of one episode."""

    sums: tuple[int, ...] = ()


class Add(vf.Toolset[vf.ToolsetConfig, Calls]):
    """A server of one tool."""

    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds."""
        self.state.sums = (*self.state.sums, a + b)
        return "hi" if len(self.state.sums) == 1 else "tool"


class Adding(vf.Task[vf.TaskData, Calls]):
    """Rewards one call that an answer follows."""

    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        """0.75 for the call, 0.25 for the answer."""
        return 0.75 * (trace.state.sums == (3,)) + 0.25 * (trace.last_reply == "hello world and more")

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """The one server."""
        return [Add(vf.ToolsetConfig())]


class ToolTaskset(vf.Taskset[Adding]):
    """One task."""

    def load(self) -> Iterable[Adding]:
        """Its prompt."""
        yield Adding(vf.TaskData(prompt="tool"), self.config.task)


if __name__ == "__main__":
    Add.run()
