"""API keys in the `keys` bucket, one per entry, so that every replica knows the same ones."""

from __future__ import annotations

import contextlib
import secrets
from datetime import datetime

from penstock.shared.errors import Conflict, NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.keys import Scope, StoredKey, new_key
from penstock.shared.transport.bus import Bus

__all__ = ["KeyStore"]

SECRET = "episode-keys"


class KeyStore:
    """Implements ``api.control.Keys``."""

    def __init__(self, bus: Bus) -> None:
        self._kv, self._private = bus.kv(subjects.KEYS), bus.kv(subjects.PRIVACY)
        self._secret = b""

    async def create(
        self, name: str, scopes: list[Scope], *, expires_at: datetime | None, rate_limit: str | None,
        models: list[str] | None = None, max_weight: float = 1.0, code_modules: list[str] | None = None,
    ) -> tuple[StoredKey, str]:  # fmt: skip
        """See ``Keys.create``."""
        id, text, digest = new_key()
        key = StoredKey(
            id=id, name=name, scopes=scopes, created_at=bus_datetime(), expires_at=expires_at,
            rate_limit=rate_limit, models=models, max_weight=max_weight, code_modules=code_modules, digest=digest,
        )  # fmt: skip
        await self._kv.create(id, key.model_dump_json().encode())
        return key, text

    async def find(self, id: str) -> StoredKey | None:
        """See ``Keys.find``."""
        entry = await self._kv.get(id)
        return StoredKey.model_validate_json(entry.value) if entry is not None and entry.value is not None else None

    async def list_all(self) -> list[StoredKey]:
        """See ``Keys.list_all``."""
        entries = await self._kv.entries()
        return [StoredKey.model_validate_json(entry.value) for entry in entries if entry.value is not None]

    async def delete(self, id: str) -> None:
        """See ``Keys.delete``."""
        if await self.find(id) is None:
            raise NotFound(f"no key '{id}'")
        await self._kv.delete(id)

    async def secret(self) -> bytes:
        """See ``Keys.secret``."""
        if not self._secret:
            if await self._private.get(SECRET) is None:
                with contextlib.suppress(Conflict):  # another replica was faster
                    await self._private.create(SECRET, secrets.token_bytes(32))
            entry = await self._private.get(SECRET)
            if entry is None or not entry.value:
                raise Unavailable("the secret of episodes' keys is gone from the bucket `privacy`")
            self._secret = entry.value
        return self._secret
