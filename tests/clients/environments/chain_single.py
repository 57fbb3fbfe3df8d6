"""One question and one answer. The chain answers the second task wrongly; scoring of the third one fails."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SingleTaskset"]


class Data(vf.TaskData):
    """Task data with the right answer."""

    answer: str


class Single(vf.Task[Data]):
    """Task whose answer is right or wrong."""

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1 for the right answer, else 0."""
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Return the number of characters of the answer; raise for the third task."""
        if self.data.answer == "broken":
            raise RuntimeError("out of order")
        return float(len(trace.last_reply))


class SingleTaskset(vf.Taskset[Single]):
    """Set of three tasks."""

    def load(self) -> Iterable[Single]:
        """Yield the tasks."""
        for answer in ("hello world and more", "hello", "broken"):
            yield Single(Data(prompt="hi", system_prompt="? ", answer=answer), self.config.task)
