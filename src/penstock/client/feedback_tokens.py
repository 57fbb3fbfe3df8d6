"""Tokens for one verdict, for both clients: ``client.feedback_tokens``."""

from __future__ import annotations

from penstock.client.calls import Call, Row, post
from penstock.client.sending import AsyncSend, Send, awaits, sends

__all__ = ["AsyncFeedbackTokens", "FeedbackTokens"]


def _create(
    metric: str, *, inference: str | None = None, episode: str | None = None, expires_in_s: float | None = None
) -> Call[Row]:
    """Make a token with which a page posts one value of ``metric`` about a response or an episode.

    The reply has the ``token``, the ``url`` that takes it, and the ``feedback_id`` by which its fate is found.
    """
    body = {"metric_name": metric, "inference_id": inference, "episode_id": episode, "expires_in_s": expires_in_s}
    return post("/v1/feedback/tokens", {key: value for key, value in body.items() if value is not None})


class FeedbackTokens:
    """Make tokens for one verdict: ``create``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    create = sends(_create)


class AsyncFeedbackTokens:
    """Make tokens for one verdict: ``create``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    create = awaits(_create)
