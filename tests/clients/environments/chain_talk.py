"""A conversation of several turns that the environment leads; the environment counts the expected answers."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["TalkEnv", "TalkTaskset"]


class Progress(vf.State):
    """State of one episode."""

    turns: int = 0


class Talk(vf.Task[vf.TaskData, Progress]):
    """Task that rewards the number of expected answers."""

    @vf.reward
    async def expected_answers(self, trace: vf.Trace) -> float:
        """Return a tenth for every expected answer."""
        return trace.state.turns / 10


class TalkTaskset(vf.Taskset[Talk]):
    """Set of one task."""

    def load(self) -> Iterable[Talk]:
        """Yield a task without a prompt: the environment opens the conversation."""
        yield Talk(vf.TaskData(prompt=None), self.config.task)


class TalkEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Environment that sends the same message three times."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one episode."""
        async with agents.agent.interaction(task) as talk:
            for _ in range(3):
                segment = await talk.turn("<eos> hi")
                if segment.terminated:
                    return
                talk.trace.state.turns += segment.last_reply == "hello world and more"
