"""A talk of several turns, led by the environment, which counts what it hears."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["TalkEnv", "TalkTaskset"]


class Heard(vf.State):
    """Of one episode."""

    turns: int = 0


class Talk(vf.Task[vf.TaskData, Heard]):
    """How long it was."""

    @vf.reward
    async def heard(self, trace: vf.Trace) -> float:
        """A tenth for every turn."""
        return trace.state.turns / 10


class TalkTaskset(vf.Taskset[Talk]):
    """One task."""

    def load(self) -> Iterable[Talk]:
        """The environment opens the talk."""
        yield Talk(vf.TaskData(prompt=None), self.config.task)


class TalkEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Says the same three times."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One episode."""
        async with agents.agent.interaction(task) as talk:
            for _ in range(3):
                segment = await talk.turn("<eos> hi")
                if segment.terminated:
                    return
                talk.trace.state.turns += segment.last_reply == "hello world and more"
