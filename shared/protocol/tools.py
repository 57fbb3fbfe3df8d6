"""Requests of rollout workers to env workers: calls of tools, and the turns of episodes that keep state.

A call without state goes to any env worker. The first one of an episode that uses state does, too: who takes it holds
the state from then on, says so (``ToolReply.holder``), and is asked for everything else of the episode.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

__all__ = ["MAX_RESULT_CHARS", "MAX_STEP_BYTES", "EpisodeState", "Purpose", "Step", "ToolReply", "ToolRequest"]

MAX_RESULT_CHARS = 1 << 16
"""A longer result is cut before it is sent."""
MAX_STEP_BYTES = 512 << 10
"""An environment that says more at once has failed: what leads a conversation is never cut."""

Purpose = Literal["call", "begin", "answer", "stop", "reward", "keep", "end"]
"""``call``: carry out tool ``name``. ``reward``: what the objects say of the answer ``arguments["answer"]``. ``keep``:
the first answer was heard, so the state is needed. ``end``: it is not needed any more. Neither of these is answered.

In an environment that leads the conversation: ``begin`` task ``arguments["task"]``, ``answer`` with a turn of the
policy, or ``stop`` because a budget is used up; the result is an environment's ``Step`` as JSON.
"""


class EpisodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a request uses: that of ``episode``, after ``number`` requests.

    A worker makes the state where ``number`` is 0, from ``seed`` and ``row`` alone. Where it has not answered that many
    requests for this episode, the state is lost: nothing goes on from another one.
    """

    episode: str
    seed: int
    number: int = 0
    row: dict[str, Any] = {}
    holder: str = ""
    """The worker that holds it, whose subject is ``subjects.env(holder)``; empty before the first answer."""


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. The id of its envelope names it: a worker that is asked again carries it out once.

    After ``start_by`` (Unix seconds) nobody waits for it any more: a worker that has not begun then does not begin.
    """

    name: str = ""
    arguments: dict[str, Any] = {}
    start_by: float = math.inf
    purpose: Purpose = "call"
    state: EpisodeState | None = None


class ToolReply(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a request.

    ``ok``: ``text`` is the result. ``error``: the call was wrong, ``text`` says why and is told to the policy.
    ``failed``: the tool broke or took too long, which says nothing about the call. ``lost``: the state of the episode
    is gone with the process that held it.
    """

    status: Literal["ok", "error", "failed", "lost"]
    text: str
    holder: str = ""
    """The worker that holds the state of the episode now."""
    gone: bool = False
    """The request failed because the state of the episode is gone, so that all that follow fail, too."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Step of an environment that leads the conversation: it says something, or the episode is over.

    ``messages`` are new since the policy's last turn, in OpenAI's form; None: the episode is over, with a reward, or
    with an error that says nothing about the policy.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    reward: float = 0.0
    metrics: dict[str, float] = {}
    error: str = ""
