"""Keys of one episode: signed, short-lived, stored nowhere. Every replica that has the secret can read them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import Literal, get_args

import msgspec

__all__ = ["EPISODE_SCOPES", "PREFIX", "EpisodeGrant", "EpisodeScope", "episode_key", "read_episode_key"]

PREFIX = "rle_"
EpisodeScope = Literal["inference:write", "feedback:write"]
EPISODE_SCOPES: tuple[EpisodeScope, ...] = get_args(EpisodeScope)
"""What the key of an episode may be for."""
_KEY = re.compile(r"rle_([A-Za-z0-9_-]{16,512})\.([A-Za-z0-9_-]{43})", re.ASCII)


class EpisodeGrant(msgspec.Struct, frozen=True, array_like=True):
    """What a key says: for which episode (`ep_` and a UUID), by which API key (its id), until when (Unix seconds)."""

    episode: str
    maker: str
    scopes: list[EpisodeScope]
    expires: int


def episode_key(grant: EpisodeGrant, secret: bytes) -> str:
    """The text of a key: ``rle_<grant>.<HMAC-SHA256>``, both in base64url."""
    body = _text(msgspec.msgpack.encode(grant))
    return f"{PREFIX}{body}.{_signature(body, secret)}"


def read_episode_key(text: str, secret: bytes) -> EpisodeGrant | None:
    """What a key says; None for one that was not signed with ``secret``. Whether it has expired is for the caller."""
    found = _KEY.fullmatch(text)
    if found is None or not hmac.compare_digest(_signature(found[1], secret), found[2]):
        return None
    try:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(found[1] + "=="), type=EpisodeGrant)
    except (msgspec.DecodeError, ValueError):  # signed by another version
        return None


def _signature(body: str, secret: bytes) -> str:
    return _text(hmac.new(secret, f"episode key 1\n{body}".encode(), hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
