"""Pseudonyms and consents of users. A user's own name is never written to a stream or table."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from typing import Literal

from penstock.shared.errors import Conflict, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

__all__ = ["Consent", "Consents", "Pseudonyms", "objection"]

log = logging.getLogger(__name__)

KEY = "pseudonym"
CONSENT = "consent"
RETRY_S = 1.0
Consent = Literal["opt_out", "opt_in"]
"""Consent that a job requires: all users except those who refused, or only those who agreed."""
OPTED_OUT, OPTED_IN = b"0", b"1"


class Pseudonyms:
    """HMACs of user names under one key of the deployment, which is in the `privacy` bucket."""

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.PRIVACY)
        self._key = b""

    async def load(self) -> None:
        """Read the secret key of the deployment, or create it if the bucket has none. Raises Unavailable."""
        with contextlib.suppress(Conflict):  # another replica was faster
            if await self._kv.get(KEY) is None:
                await self._kv.create(KEY, secrets.token_bytes(32))
        entry = await self._kv.get(KEY)
        if entry is None or not entry.value:
            raise Unavailable("the key of pseudonyms is gone from the bucket `privacy`")
        self._key = entry.value

    def of(self, user: str) -> str:
        """Return the pseudonym of a user, 32 hex digits; '' for ''. Raises Unavailable before ``load``."""
        if not user:
            return ""
        return self.digest(user).hex()[:32]

    def digest(self, text: str) -> bytes:
        """Return 32 bytes that only the deployment can derive from a text. Raises Unavailable before ``load``."""
        if not self._key:
            raise Unavailable("the key of pseudonyms is not read yet; retry in a moment")
        return hmac.new(self._key, text.encode(), hashlib.sha256).digest()


class Consents:
    """Consents of users, by pseudonym; a change reaches every replica within moments."""

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.PRIVACY)
        self._known: dict[str, bool] = {}

    def of(self, pseudonym: str) -> bool | None:
        """Return the user's consent: True if jobs may train on the user's data, False if not, None if the user has not
        decided."""
        return self._known.get(pseudonym)

    def opted_out(self, pseudonym: str) -> bool:
        """Return True if the user has refused training on the user's data."""
        return self.of(pseudonym) is False

    async def say(self, pseudonym: str, *, train: bool) -> None:
        """Store a user's consent durably. Raises Unavailable."""
        await self._kv.put(f"{CONSENT}.{pseudonym}", OPTED_IN if train else OPTED_OUT)
        self._take(pseudonym, OPTED_IN if train else OPTED_OUT)

    async def read(self) -> None:
        """Load all consents stored until now. Raises Unavailable."""
        for entry in await self._kv.entries(CONSENT):
            self._take(entry.key.partition(".")[2], entry.value)

    async def run(self) -> None:
        """Follow changes of consents until cancelled."""
        while True:
            try:
                async with contextlib.aclosing(self._kv.watch(CONSENT)) as entries:
                    async for entry in entries:
                        self._take(entry.key.partition(".")[2], entry.value)
            except Unavailable as error:
                log.info("consents are not followed: %s", error)
            await asyncio.sleep(RETRY_S)

    def _take(self, pseudonym: str, value: bytes | None) -> None:
        if value is None:
            self._known.pop(pseudonym, None)
        else:
            self._known[pseudonym] = value != OPTED_OUT


def objection(said: bool | None, consent: Consent) -> str:
    """Return the reason why a job that requires ``consent`` must not train on a user's data, or '' if the job may.
    ``said`` is the user's consent, as ``Consents.of`` returns it."""
    if said is False:
        return "opted_out"
    return "no_consent" if said is None and consent == "opt_in" else ""
