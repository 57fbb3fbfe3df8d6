"""Feedback tokens, each for one verdict, for both clients: ``client.feedback_tokens``."""

from __future__ import annotations

from penstock.client.calls import Call, make
from penstock.client.results import FeedbackToken
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, awaits, sends

__all__ = ["AsyncFeedbackTokens", "FeedbackTokens"]


def _create(
    metric: str, *, inference: str | None = None, episode: str | None = None, expires_in_s: float | None = None
) -> Call[FeedbackToken]:
    """Create a token with which a web page posts one value of ``metric`` about a response or an episode.

    The result has the ``token``, the ``url`` that accepts it, and the ``feedback_id`` whose status can be queried.
    """
    return make(
        "/v1/feedback/tokens", one(FeedbackToken), metric_name=metric, inference_id=inference, episode_id=episode,
        expires_in_s=expires_in_s,
    )  # fmt: skip


class FeedbackTokens:
    """Feedback tokens, each for one verdict: ``create``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    create = sends(_create)


class AsyncFeedbackTokens:
    """Feedback tokens, each for one verdict: ``create``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    create = awaits(_create)
