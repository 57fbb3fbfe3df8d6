"""Requests of rollout workers to env workers: tool calls, and turns of episodes with state.

A stateless call goes to any env worker. So does the first stateful call of an episode: the worker that takes it holds
the state from then on, names itself in ``ToolReply.holder``, and receives all further requests of the episode.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

__all__ = ["MAX_RESULT_CHARS", "MAX_STEP_BYTES", "EpisodeState", "Purpose", "Step", "ToolReply", "ToolRequest"]

MAX_RESULT_CHARS = 1 << 16
"""Longest result of a tool in characters; longer results are cut before they are sent."""
MAX_STEP_BYTES = 512 << 10
"""Largest message of an environment that leads the conversation (bytes). A larger message is never cut; the step
fails."""

Purpose = Literal["call", "begin", "answer", "stop", "reward", "keep", "end"]
"""``call``: execute tool ``name``. ``reward``: return the reward of the environment's objects for the answer
``arguments["answer"]``. ``keep``: the client received the first answer, so the state is needed. ``end``: the state is
no longer needed. The client waits for no reply to ``keep`` and ``end``.

For an environment that leads the conversation: ``begin`` task ``arguments["task"]``, ``answer`` with a turn of the
policy, or ``stop`` because a budget is used up; the result is an environment's ``Step`` as JSON.
"""


class EpisodeState(msgspec.Struct, frozen=True, kw_only=True):
    """State on which a request operates: the state of ``episode`` after ``number`` answered requests.

    A worker creates the state if ``number`` is 0, from ``seed`` and ``row`` alone. A worker that has not answered
    exactly that many requests of this episode reports the state as lost and never continues from another one.
    """

    episode: str
    seed: int
    number: int = 0
    row: dict[str, Any] = {}
    holder: str = ""
    """Worker that holds the state, whose subject is ``subjects.env(holder)``; empty before the first answer."""


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to an env worker. The id of its envelope identifies the request: a worker executes a repeated request
    once.

    ``start_by`` (Unix seconds) is the time after which the caller no longer waits: a worker does not begin after it.
    """

    name: str = ""
    arguments: dict[str, Any] = {}
    start_by: float = math.inf
    purpose: Purpose = "call"
    state: EpisodeState | None = None


class ToolReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a ``ToolRequest``: its result, or the cause of the failure.

    ``ok``: ``text`` is the result. ``error``: the call was wrong, ``text`` is the cause and is shown to the policy.
    ``failed``: the tool broke or timed out, independent of the call. ``lost``: the state of the episode was lost with
    the process that held it.
    """

    status: Literal["ok", "error", "failed", "lost"]
    text: str
    holder: str = ""
    """Worker that now holds the state of the episode."""
    gone: bool = False
    """True if the request failed because the state of the episode is lost, so that all further requests of the episode
    fail, too."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Step of an environment that leads the conversation (type `verifiers`): new messages, or the end of the episode.

    ``messages`` are new since the policy's last turn, in OpenAI's format; None: the episode has ended, with a reward,
    or with an error that is independent of the policy.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    reward: float = 0.0
    metrics: dict[str, float] = {}
    error: str = ""
