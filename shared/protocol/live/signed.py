"""Signed texts: any process with the secret can verify and read them, so they need not be stored."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

__all__ = ["SignedTexts"]

G = TypeVar("G", bound=msgspec.Struct)


@dataclass(frozen=True)
class SignedTexts(Generic[G]):
    """Texts ``<prefix><grant>.<HMAC-SHA256>``, both parts in base64url.

    ``purpose`` is signed with the grant, so that a text for one purpose is invalid for another.
    """

    prefix: str
    purpose: str
    kind: type[G]
    _pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pattern = re.compile(rf"{self.prefix}([A-Za-z0-9_-]{{16,512}})\.([A-Za-z0-9_-]{{43}})", re.ASCII)
        object.__setattr__(self, "_pattern", pattern)

    def write(self, grant: G, secret: bytes) -> str:
        """Return the signed text of ``grant``."""
        body = _text(msgspec.msgpack.encode(grant))
        return f"{self.prefix}{body}.{self._signature(body, secret)}"

    def read(self, text: str, secret: bytes) -> G | None:
        """Return the grant in a text, or None if it was not signed with ``secret`` for this purpose."""
        found = self._pattern.fullmatch(text)
        if found is None or not hmac.compare_digest(self._signature(found[1], secret), found[2]):
            return None
        try:
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(found[1] + "=="), type=self.kind)
        except (msgspec.DecodeError, ValueError):  # written by another version
            return None

    def _signature(self, body: str, secret: bytes) -> str:
        return _text(hmac.new(secret, f"{self.purpose}\n{body}".encode(), hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
