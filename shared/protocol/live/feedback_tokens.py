"""Tokens that allow one item of feedback on one answer or episode, for web pages that ask visitors for feedback and
must not hold an API key."""

from __future__ import annotations

import msgspec

from penstock.shared.protocol.live.signed import SignedTexts

__all__ = ["PREFIX", "TOKENS", "FeedbackGrant"]

PREFIX = "rlt_"


class FeedbackGrant(msgspec.Struct, frozen=True, array_like=True):
    """Contents of a token: the feedback that it allows, the id of the API key that created it, and its expiry (Unix
    seconds).

    ``id`` is that of the resulting feedback item, so a token creates at most one. ``target`` (a canonical UUID) is a
    response, or with ``by_episode`` an episode.
    """

    id: str
    target: str
    by_episode: bool
    metric: str
    maker: str
    expires: int


TOKENS = SignedTexts(PREFIX, "feedback token 1", FeedbackGrant)
