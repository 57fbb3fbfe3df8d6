"""Keys of one episode: signed, short-lived, and never stored. Every replica with the secret can verify them."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from penstock.shared.protocol.live.signed import SignedTexts

__all__ = ["EPISODE_SCOPES", "PREFIX", "EpisodeGrant", "EpisodeScope", "episode_key", "read_episode_key"]

PREFIX = "rle_"
EpisodeScope = Literal["inference:write", "feedback:write"]
EPISODE_SCOPES: tuple[EpisodeScope, ...] = get_args(EpisodeScope)
"""Scopes of an episode key."""


class EpisodeGrant(msgspec.Struct, frozen=True, array_like=True):
    """Contents of a key: its episode (`ep_` and a UUID), the id of the API key that created it, its expiry (Unix
    seconds)."""

    episode: str
    maker: str
    scopes: list[EpisodeScope]
    expires: int


_KEYS = SignedTexts(PREFIX, "episode key 1", EpisodeGrant)


def episode_key(grant: EpisodeGrant, secret: bytes) -> str:
    """Return the text of the episode key with the contents ``grant``, signed with ``secret``."""
    return _KEYS.write(grant, secret)


def read_episode_key(text: str, secret: bytes) -> EpisodeGrant | None:
    """Return the contents of an episode key, or None if ``text`` was not signed with ``secret``. The caller checks the
    expiry."""
    return _KEYS.read(text, secret)
