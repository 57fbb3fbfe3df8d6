"""Authenticates callers by bearer keys with scopes. A deployment without keys accepts only requests from the loopback
address."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import time
from dataclasses import dataclass, replace
from functools import lru_cache

from starlette.datastructures import Headers

from penstock.services.coordinator.access import KeyStore
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Forbidden, Unauthenticated
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.keys import Scope, StoredKey, key_id
from penstock.shared.protocol.live.episode_keys import PREFIX as EPISODE_PREFIX
from penstock.shared.protocol.live.episode_keys import read_episode_key
from penstock.shared.protocol.live.feedback_tokens import PREFIX as TOKEN_PREFIX
from penstock.shared.protocol.live.feedback_tokens import TOKENS, FeedbackGrant

__all__ = ["ANONYMOUS", "Caller", "KeyRing", "is_loopback", "needs_key"]

logger = logging.getLogger(__name__)

TRUST_S = 1.0
"""Time that a looked-up key is cached (seconds): a revoked key may work this much longer on other replicas."""
MAX_KNOWN = 1024
CONFIGURED = "PENSTOCK_API_KEYS"
"""Name shown for keys from the configuration: the environment variable that holds these keys."""


@dataclass(frozen=True)
class Caller:
    """Sender of a request. ``id`` names the sender's key without revealing it; ``rate_limit`` replaces the deployment's
    rate limit."""

    id: str
    scopes: frozenset[Scope]
    rate_limit: str | None = None
    episode: str = ""
    """For the bearer of an episode key: the only episode (`ep_` and a UUID) that the bearer may use and give feedback
    on; ``id`` names the key that created the episode key. '' for other callers."""
    token: FeedbackGrant | None = None
    """For the bearer of a feedback token: the only feedback that the bearer may post; ``id`` names the key that created
    the token. None for other callers."""
    models: frozenset[str] | None = None
    """Names and ids of the only jobs that the caller may use; None: all."""
    max_weight: float = 1.0
    """Largest weight of the caller's feedback; a larger weight is reduced to this value."""
    name: str = ""
    """Name of the key, for display."""
    code_modules: frozenset[str] | None = None
    """Modules whose functions the caller's job files may name, of those that the deployment allows; None: all."""

    @property
    def sender(self) -> str:
        """Identity of the sender: the id of its key, followed by the id of the episode (for an episode key) or of the
        token (for a feedback token)."""
        return self.id + self.episode + (self.token.id if self.token is not None else "")

    def may(self, scope: Scope) -> bool:
        """Return True if the key has ``scope``, by itself or through ``admin``."""
        return scope in self.scopes or "admin" in self.scopes

    def may_use(self, name: str, job: str) -> bool:
        """Return True if the caller may use the model ``name`` of job ``job``."""
        return self.models is None or not self.models.isdisjoint((name, job))


ANONYMOUS = Caller("local", frozenset({"admin"}))
"""Caller in a deployment without keys, which accepts only requests from this machine."""


def needs_key(settings: ServiceSettings) -> bool:
    """Return True if requests without a key are refused."""
    return bool(_configured(settings))


class KeyRing:
    """All keys of a deployment: the keys in the configuration, which have every scope, and the keys in the
    ``KeyStore``.

    Raises:
        ConfigError: the API would be open without a key, to the network or to every user of this machine.
    """

    def __init__(self, settings: ServiceSettings, store: KeyStore) -> None:
        keys = _configured(settings)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._store = store
        self._known: dict[str, tuple[float, StoredKey | None]] = {}
        if not keys and not is_loopback(settings.http_host):
            raise ConfigError(
                f"the API would listen on {settings.http_host} without a key: set PENSTOCK_API_KEYS "
                "(comma-separated), or PENSTOCK_HTTP_HOST=127.0.0.1"
            )
        if not keys and not settings.open_loopback:
            raise ConfigError(
                "the API would be open to every user of this machine: set PENSTOCK_API_KEYS (comma-separated), or "
                "PENSTOCK_OPEN_LOOPBACK=true where all of them are trusted"
            )
        if not keys:
            logger.warning("PENSTOCK_OPEN_LOOPBACK: every user and every program of this machine is an administrator")

    @property
    def required(self) -> bool:
        """True if requests need a key."""
        return bool(self._digests)

    async def caller(self, headers: Headers) -> Caller:
        """Return the sender of a request with these headers.

        Raises:
            Unauthenticated: the request has no valid key.
            Forbidden: no keys exist, and the request comes from a web page.
            Unavailable: the bus does not answer, so the key cannot be checked.
        """
        text = _presented(headers)
        presented = hashlib.sha256(text.encode()).digest()
        matches = [hmac.compare_digest(presented, known) for known in self._digests]  # all of them: no early exit
        if any(matches):
            return Caller(_id_of(presented), frozenset({"admin"}), name=CONFIGURED)
        if text.startswith(EPISODE_PREFIX):
            return await self._of_episode(text)
        if text.startswith(TOKEN_PREFIX):
            return await self._of_token(text)
        id = key_id(text)
        if id is not None:
            return await self._of_store(id, text)
        if not self._digests:
            _refuse_foreign_pages(headers)
            return ANONYMOUS
        raise _unauthorized("a valid key is needed")

    async def _of_store(self, id: str, text: str) -> Caller:
        key = await self._find(id) if id else None
        if key is None or not key.fits(text):
            raise _unauthorized("this key does not exist (any more)")
        if key.expires_at is not None and key.expired:
            raise _unauthorized(f"key '{key.name}' expired at {key.expires_at.isoformat(timespec='seconds')}")
        return replace(_holder(key), scopes=frozenset(key.scopes))

    async def _of_episode(self, text: str) -> Caller:
        """Return the bearer of an episode key. An episode key stops working when the key that created it is revoked or
        expires."""
        grant = read_episode_key(text, await self._store.secret())
        if grant is None:
            raise _unauthorized("this key of an episode was not made here")
        if grant.expires <= bus_time():
            raise _unauthorized(f"this key of episode '{grant.episode}' has expired; ask for another one")
        return replace(await self._maker(grant.maker), scopes=frozenset(grant.scopes), episode=grant.episode)

    async def _of_token(self, text: str) -> Caller:
        """Return the bearer of a feedback token."""
        grant = TOKENS.read(text, await self._store.secret())
        if grant is None:
            raise _unauthorized("this token was not made here")
        if grant.expires <= bus_time():
            raise _unauthorized("this token has expired; ask for another one")
        return replace(await self._maker(grant.maker), scopes=frozenset({"feedback:write"}), token=grant)

    async def _maker(self, maker: str) -> Caller:
        """Return the owner of the key with id ``maker``, which created an episode key or a feedback token. The returned
        ``Caller`` has no scopes.

        Raises:
            Unauthenticated: the key does not exist any more.
        """
        if maker in self._configured_ids() or (maker == ANONYMOUS.id and not self._digests):
            return Caller(maker, frozenset())
        found = await self._find(maker)
        if found is None or found.expired:
            raise _unauthorized("the key that made this one does not exist (any more)")
        return _holder(found)

    def _configured_ids(self) -> set[str]:
        return {_id_of(digest) for digest in self._digests}

    async def _find(self, id: str) -> StoredKey | None:
        until, key = self._known.get(id, (0.0, None))
        if until > time.monotonic():
            return key
        key = await self._store.find(id)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[id] = (time.monotonic() + TRUST_S, key)
        return key

    def forget(self, id: str) -> None:
        """Drop key ``id``, which this replica has just revoked, from the cache."""
        self._known.pop(id, None)


def _holder(key: StoredKey) -> Caller:
    """Return a ``Caller`` for the owner of ``key``, without the key's scopes."""
    models = None if key.models is None else frozenset(key.models)
    modules = frozenset(key.code_modules or ()) if key.code_modules is not None or models is not None else None
    return Caller(
        key.id,
        frozenset(),
        key.rate_limit,
        models=models,
        max_weight=key.max_weight,
        name=key.name,
        code_modules=modules,
    )


def _id_of(digest: bytes) -> str:
    """Return the id of a configured key: the first 16 hex digits of ``digest``, the key's SHA-256."""
    return digest.hex()[:16]


def _configured(settings: ServiceSettings) -> list[str]:
    return [key.strip() for key in settings.api_keys.split(",") if key.strip()]


def _unauthorized(what: str) -> Unauthenticated:
    return Unauthenticated(
        "invalid_api_key",
        f"{what}: send 'Authorization: Bearer KEY' (PENSTOCK_API_KEY for the command line). "
        "The key that 'penstock up' made is in api.key of its data directory",
    )


def _presented(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")


def _refuse_foreign_pages(headers: Headers) -> None:
    """Refuse a request whose header Host or Origin names another machine. Without keys, only loopback protects the API,
    and a foreign web page that a browser on this machine shows can send requests over loopback."""
    host = _host_name(headers.get("host", "localhost"))
    origin = headers.get("origin")
    origin_host = _host_name(origin.partition("://")[2]) if origin else "localhost"
    if not (is_loopback(host) and is_loopback(origin_host)):
        raise Forbidden(
            "not_local",
            f"without PENSTOCK_API_KEYS only this machine may call (Host '{host}', Origin '{origin or 'none'}')",
        )


def _host_name(netloc: str) -> str:
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0]


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
