"""Signatures of webhooks (Standard Webhooks 1.0: HMAC-SHA256 over id, timestamp and body)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

__all__ = ["new_secret", "signature_headers"]

PREFIX = "whsec_"
SECRET_BYTES = 32


def new_secret() -> str:
    """Return ``whsec_`` and 32 random bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature_headers(secret: str, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three signature headers; ``timestamp`` is the attempt's Unix time, ``id`` is equal in all attempts."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }
