"""Keys of one episode: signed, short-lived, stored nowhere. Every replica that has the secret can read them."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from penstock.shared.protocol.signed import SignedTexts

__all__ = ["EPISODE_SCOPES", "PREFIX", "EpisodeGrant", "EpisodeScope", "episode_key", "read_episode_key"]

PREFIX = "rle_"
EpisodeScope = Literal["inference:write", "feedback:write"]
EPISODE_SCOPES: tuple[EpisodeScope, ...] = get_args(EpisodeScope)
"""What the key of an episode may be for."""


class EpisodeGrant(msgspec.Struct, frozen=True, array_like=True):
    """What a key says: for which episode (`ep_` and a UUID), by which API key (its id), until when (Unix seconds)."""

    episode: str
    maker: str
    scopes: list[EpisodeScope]
    expires: int


_KEYS = SignedTexts(PREFIX, "episode key 1", EpisodeGrant)


def episode_key(grant: EpisodeGrant, secret: bytes) -> str:
    """The text of a key."""
    return _KEYS.write(grant, secret)


def read_episode_key(text: str, secret: bytes) -> EpisodeGrant | None:
    """What a key says; None for one that was not signed with ``secret``. Whether it has expired is for the caller."""
    return _KEYS.read(text, secret)
