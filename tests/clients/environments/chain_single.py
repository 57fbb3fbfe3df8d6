"""One question, one answer. The second task is answered wrongly by the chain, the third one fails."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SingleTaskset"]


class Data(vf.TaskData):
    """The right answer."""

    answer: str


class Single(vf.Task[Data]):
    """Right or wrong."""

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """1 or 0."""
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Characters of the answer."""
        if self.data.answer == "broken":
            raise RuntimeError("out of order")
        return float(len(trace.last_reply))


class SingleTaskset(vf.Taskset[Single]):
    """Three tasks."""

    def load(self) -> Iterable[Single]:
        """Their prompts."""
        for answer in ("hello world and more", "hello", "broken"):
            yield Single(Data(prompt="hi", system_prompt="? ", answer=answer), self.config.task)
