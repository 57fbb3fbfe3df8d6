"""Checks of requests with an episode key, which is valid only in its own episode and for feedback on that episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.posts import (
    Correction,
    Metric,
    PostedInteraction,
    PostedPreference,
    Preference,
)
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.protocol.live.interaction import bare_id, job_mark, marked_id

__all__ = ["check_own_episode", "own_episode"]


def own_episode(caller: Caller, named: str, job: str) -> str:
    """Return the id of the episode to which a request belongs.

    An episode key determines the episode; for other keys it is ``named``, the id in the request ('' for none).

    Raises:
        HttpProblem: 403 the key is for another episode than ``named``, or for an episode with another model.
    """
    if not caller.episode:
        return named
    if named and bare_id(named) != bare_id(caller.episode):
        raise _other(caller, f"the request names episode '{named}'")
    mark = marked_id(caller.episode)
    if mark is None or mark[1] != job_mark(job):
        raise _other(caller, "which is with another model")
    return caller.episode


async def check_own_episode(caller: Caller, posts: Sequence[Any], service: FeedbackService) -> None:
    """Check that an episode key posts feedback on its own episode only. Other keys pass.

    Raises:
        HttpProblem: 403 the feedback is not about the episode or its turns.
    """
    if not caller.episode:
        return
    own = bare_id(caller.episode) or ""
    answers: set[str] = set()
    for post in posts:
        if isinstance(post, PostedInteraction | PostedPreference):
            raise _other(caller, "what was not said in it cannot be posted with it")
        if isinstance(post, Metric) and getattr(post, "episode_id", None) is not None:
            if bare_id(str(getattr(post, "episode_id", ""))) != own:
                raise _other(caller, "the feedback is about another one")
            continue
        answers |= {bare_id(text) or text for text in _judged(post)}
    episodes = await service.episodes_of(sorted(answers)) if answers else {}
    for answer in answers:
        if episodes.get(answer) != own:
            raise _other(caller, f"interaction '{answer}' is not recorded in it")


def _judged(post: Any) -> list[str]:
    if isinstance(post, Preference):
        return [post.chosen, post.rejected]
    return [post.inference_id] if isinstance(post, Correction) else [str(getattr(post, "inference_id", ""))]


def _other(caller: Caller, why: str) -> HttpProblem:
    return HttpProblem(403, "other_episode", f"this key is for episode '{caller.episode}': {why}")
