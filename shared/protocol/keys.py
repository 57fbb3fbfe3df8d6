"""API keys and their permissions, as stored and as returned by the API. The secret itself is never stored."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import datetime
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from penstock.shared.protocol.bus_clock import bus_datetime

__all__ = ["SCOPES", "KeyRecord", "Scope", "StoredKey", "key_id", "new_key"]

Scope = Literal[
    "jobs:read",
    "jobs:write",
    "jobs:code",
    "models:read",
    "inference:write",
    "episodes:write",
    "feedback:write",
    "feedback:admin",
    "artifacts:read",
    "metrics:read",
    "admin",
]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Scopes of keys. ``admin`` includes all the others."""

_KEY = re.compile(r"rlk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
PREFIX = "rlk_"


class KeyRecord(BaseModel):
    """Key as returned by the API. ``rate_limit`` (such as ``600/minute``) replaces the rate limit of the deployment.

    ``models`` are the names or ids of the only jobs that the key may access; None: all. ``max_weight`` is the upper
    bound of the weight of its feedback. ``code_modules`` are the modules whose functions its job files may name; None:
    the modules that the deployment allows, or no module if ``models`` is set.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["rl.key"] = "rl.key"
    name: str
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None = None
    rate_limit: str | None = None
    models: list[str] | None = None
    max_weight: float = 1.0
    code_modules: list[str] | None = None


class StoredKey(KeyRecord):
    """Key as stored: with the SHA-256 (hex) of its whole text, which contains 256 random bits."""

    digest: str = Field(repr=False)

    def fits(self, text: str) -> bool:
        """Return True if ``text`` is this key; compares in constant time."""
        return hmac.compare_digest(_digest(text), self.digest)

    @property
    def expired(self) -> bool:
        """True if the key has expired."""
        return self.expires_at is not None and self.expires_at <= bus_datetime()

    def shown(self) -> KeyRecord:
        """Return the record without the digest."""
        return KeyRecord(**{name: getattr(self, name) for name in KeyRecord.model_fields})


def key_id(text: str) -> str | None:
    """Return the id in the key ``text``; '' if the key is malformed, None if ``text`` does not begin like a key."""
    if not text.startswith(PREFIX):
        return None
    found = _KEY.fullmatch(text)
    return found[1] if found else ""


def new_key() -> tuple[str, str, str]:
    """Return a new key as ``(id, text, digest)``, with the text ``rlk_<id>_<32 random bytes>``."""
    id = secrets.token_hex(8)
    text = f"{PREFIX}{id}_{secrets.token_urlsafe(32)}"
    return id, text, _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
