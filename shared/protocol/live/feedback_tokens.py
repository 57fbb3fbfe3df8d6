"""Tokens for one verdict on one answer or episode: for a page that asks its visitor and should hold no key."""

from __future__ import annotations

import msgspec

from penstock.shared.protocol.live.signed import SignedTexts

__all__ = ["PREFIX", "TOKENS", "FeedbackGrant"]

PREFIX = "rlt_"


class FeedbackGrant(msgspec.Struct, frozen=True, array_like=True):
    """Contents of a token: the verdict that it allows, the API key that made it (its id), its end (Unix seconds).

    ``id`` is the item of feedback that it becomes, which is why it becomes only one. ``target`` (a canonical UUID) is
    a response, or with ``by_episode`` an episode.
    """

    id: str
    target: str
    by_episode: bool
    metric: str
    maker: str
    expires: int


TOKENS = SignedTexts(PREFIX, "feedback token 1", FeedbackGrant)
