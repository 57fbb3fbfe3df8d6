"""Creation of all streams and buckets. Idempotent: several services may call it concurrently."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from penstock.shared.errors import ConfigError, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.transport.connection import Connection
from penstock.shared.transport.jetstream import ApiError, Code, call, retry_until

__all__ = ["BUCKETS", "STREAMS", "ensure", "max_bytes", "missing"]

log = logging.getLogger(__name__)

STREAMS = (
    subjects.TICKETS,
    subjects.RAW,
    subjects.EXPERIENCE,
    subjects.BATCHES,
    subjects.LEDGER,
    subjects.SNAPSHOTS,
    subjects.EVENTS,
    subjects.METRICS,
    subjects.INTERACTIONS,
    subjects.FEEDBACK,
    subjects.DECISIONS,
    subjects.DEAD,
    subjects.AUDIT,
    subjects.VIDEOS,
    subjects.PARTIAL,
)
LIVE = frozenset({subjects.INTERACTIONS, subjects.FEEDBACK})
"""Streams of live traffic and its feedback."""
WORK_QUEUES = frozenset({subjects.TICKETS, subjects.RAW})
BUCKETS = (
    subjects.JOBS, subjects.KEYS, subjects.PRIVACY, subjects.EPISODES, subjects.POLICY, subjects.MANIFESTS,
    subjects.LEASES, subjects.ANSWERS, subjects.WEBHOOKS,
)  # fmt: skip
SHORT_LIVED_S = {subjects.ANSWERS: 1800}
"""Age limit of entries in buckets that serve as caches (seconds). A full bucket drops its oldest entries."""
EXPIRING = frozenset({subjects.EPISODES})
"""Buckets whose entries each have their own expiry."""
ERASABLE = frozenset({subjects.EPISODES})
"""Buckets with content from users: entries can be overwritten in the files of the server."""
EXPIRING_S = 38 * 86400
"""Age limit of the EXPIRING buckets (seconds), longer than the expiry of any entry. Servers that do not support an
expiry per message apply only this limit."""
EXPIRING_SINCE = (2, 11, 0)
BUCKET_BYTES = 64 << 20
SNAPSHOT_BYTES = 256 << 20
"""Largest size of SNAPSHOTS (bytes), for two snapshots of each running job. A snapshot has a few hundred bytes for each
batch that is still in the log."""
AUDIT_BYTES = 256 << 20
"""Largest size of AUDIT (bytes), for some 400,000 records of 600 bytes. A full stream drops its oldest records."""
VIDEO_BYTES = 256 << 20
"""Largest size of VIDEOS (bytes), for about a thousand films of a few seconds. A full stream drops its oldest films."""
PARTIAL_BYTES = 256 << 20
"""Largest size of PARTIAL (bytes), for some 30 million tokens. A full stream drops its oldest completions."""
PARTIAL_S = 3600
"""Age limit of a completion in progress (seconds); an unfinished ticket is redelivered within seconds."""
DUPLICATES_S = 300
"""Window of message ids that a stream remembers (seconds); longer than any publish retries."""
ATOMIC_SINCE = (2, 12, 1)
NO_ROOM = (Code.STORAGE_RESOURCES, Code.INSUFFICIENT_RESOURCES)


def max_bytes(*, experience_bytes: int, stream_bytes: int, ledger_bytes: int | None = None) -> dict[str, int]:
    """Return the size limit of each stream, by its name on the server (``KV_BUCKET`` for a bucket).

    ``ledger_bytes`` is the limit of LEDGER; None: ``stream_bytes``.
    """
    sizes = dict.fromkeys(STREAMS, stream_bytes)
    sizes |= {
        subjects.EXPERIENCE: experience_bytes,
        subjects.LEDGER: stream_bytes if ledger_bytes is None else ledger_bytes,
        subjects.SNAPSHOTS: min(SNAPSHOT_BYTES, stream_bytes // 4),  # these four together: at most stream_bytes
        subjects.AUDIT: min(AUDIT_BYTES, stream_bytes // 4),
        subjects.VIDEOS: min(VIDEO_BYTES, stream_bytes // 4),
        subjects.PARTIAL: min(PARTIAL_BYTES, stream_bytes // 4),
    }
    return sizes | {f"KV_{bucket}": min(BUCKET_BYTES, stream_bytes) for bucket in BUCKETS}


async def ensure(
    connection: Connection,
    *,
    experience_bytes: int,
    stream_bytes: int,
    ledger_bytes: int | None = None,
    live_keep_s: float | None = None,
    audit_keep_s: float | None = None,
    replicas: int = 1,
    update: bool = True,
    deadline_s: float = 30.0,
) -> None:
    """Create missing streams and, with ``update``, change the streams whose configuration differs from these arguments;
    replicas are added, never removed.

    Raises:
        ConfigError: the server has no room for these sizes, or an existing stream cannot be changed to fit.
        Unavailable: no answer until the deadline.
    """
    atomic = connection.server_version >= ATOMIC_SINCE
    sizes = max_bytes(experience_bytes=experience_bytes, stream_bytes=stream_bytes, ledger_bytes=ledger_bytes)
    configs = []
    for name in STREAMS:
        configs.append(
            _base(name, [f"{name.lower()}.>"], sizes[name], replicas)
            | {"retention": "workqueue" if name in WORK_QUEUES else "limits", "allow_atomic": atomic}
            | (_kept(live_keep_s) if live_keep_s is not None and name in LIVE else {})
            | (_append_only(audit_keep_s) if name == subjects.AUDIT else {})
            | ({"discard": "old"} if name == subjects.VIDEOS else {})
            | (_newest_only(PARTIAL_S) if name == subjects.PARTIAL else {})
        )
    for bucket in BUCKETS:
        configs.append(
            _base(f"KV_{bucket}", [f"$KV.{bucket}.>"], sizes[f"KV_{bucket}"], replicas)
            | {"retention": "limits", "max_msgs_per_subject": 1, "allow_rollup_hdrs": True}
            | {"deny_delete": bucket not in ERASABLE}
            | _short_lived(bucket)
            | _expiring(bucket, connection.server_version)
        )
    made = (_ensure_one(connection, config, update, deadline_s) for config in configs)
    for result in await asyncio.gather(*made, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def missing(connection: Connection, *, deadline_s: float = 5.0) -> list[str]:
    """Return the streams and buckets that do not exist yet.

    Raises:
        Unavailable: no answer until the deadline.
    """
    wanted = [*STREAMS, *(f"KV_{bucket}" for bucket in BUCKETS)]
    found: set[str] = set()
    while True:
        body = {"offset": len(found)}
        answer = await call(connection, "STREAM.NAMES", body, deadline_s=deadline_s, what="names of the streams")
        page = answer.get("streams") or []
        found.update(page)
        if not page or len(found) >= answer.get("total", 0):
            return [name for name in wanted if name not in found]


async def _exists(connection: Connection, stream: str, deadline_s: float) -> bool:
    try:
        await call(connection, f"STREAM.INFO.{stream}", deadline_s=deadline_s, what=f"state of stream {stream}")
    except NotFound:
        return False
    return True


async def _changed(connection: Connection, config: dict[str, Any], deadline_s: float) -> dict[str, Any] | None:
    """Return the configuration of an existing stream after ``config`` is merged in; None if the stream already has this
    configuration.

    Settings made by others (placement, compression) stay. Replicas are never reduced. A stream that discards old
    messages, and holds more than its new size limit, keeps its limit: otherwise the server would delete messages. The
    same holds for SNAPSHOTS, which had a larger limit in earlier versions and is derived from LEDGER.

    Raises:
        ConfigError: any other stream holds more than its new size limit.
    """
    name, most = config["name"], config["max_bytes"]
    info = await call(connection, f"STREAM.INFO.{name}", deadline_s=deadline_s, what=f"state of stream {name}")
    found, held = info["config"], int(info["state"]["bytes"])
    if config["discard"] == "new" and held > most and name != subjects.SNAPSHOTS:
        raise ConfigError(
            f"stream {name} holds {held} bytes, more than the {most} that it is to have: raise "
            "PENSTOCK_STREAM_BYTES or PENSTOCK_EXPERIENCE_BYTES; nothing is dropped for a smaller size"
        )
    wanted = found | config
    if held > most:
        wanted["max_bytes"] = found["max_bytes"]
        log.info("stream %s keeps its %d bytes: it holds %d, more than %d", name, found["max_bytes"], held, most)
    if found["num_replicas"] > config["num_replicas"]:
        wanted["num_replicas"] = found["num_replicas"]
        log.info("stream %s has %d replicas and keeps them", name, found["num_replicas"])
    elif found["num_replicas"] < config["num_replicas"]:
        log.warning("stream %s gets %d replicas instead of %d", name, config["num_replicas"], found["num_replicas"])
    if found.get("deny_delete"):  # irreversible on the server
        wanted["deny_delete"] = True
    return None if all(found.get(key, _absent(value)) == value for key, value in wanted.items()) else wanted


def _absent(value: object) -> object:
    """Return the value of a field that the server omits: the zero value of the type of ``value``."""
    return type(value)()


def _base(name: str, stream_subjects: list[str], max_bytes: int, replicas: int) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": stream_subjects,
        "storage": "file",
        "discard": "new",
        "max_bytes": max_bytes,
        "num_replicas": replicas,
        "max_age": 0,
        "allow_direct": True,
        "duplicate_window": DUPLICATES_S * 1_000_000_000,
    }


def _kept(seconds: float) -> dict[str, Any]:
    return {"max_age": round(seconds * 1e9), "duplicate_window": round(min(DUPLICATES_S, seconds) * 1e9)}


def _append_only(keep_s: float | None) -> dict[str, Any]:
    """Return the settings of an append-only stream. ``keep_s``: age limit of messages in seconds; None: no limit.

    A full stream drops its oldest messages. Clients can neither delete nor purge messages; these two settings
    cannot be undone.
    """
    fixed = {"discard": "old", "deny_delete": True, "deny_purge": True}
    return fixed | (_kept(keep_s) if keep_s is not None else {})


def _newest_only(keep_s: float) -> dict[str, Any]:
    """Return the settings of a cache: it has one message per subject, and drops its oldest messages when it is full."""
    return {"discard": "old", "max_msgs_per_subject": 1, **_kept(keep_s)}


def _short_lived(bucket: str) -> dict[str, Any]:
    if bucket not in SHORT_LIVED_S:
        return {}
    return {"discard": "old", "max_age": SHORT_LIVED_S[bucket] * 1_000_000_000}


def _expiring(bucket: str, server: tuple[int, ...]) -> dict[str, Any]:
    if bucket not in EXPIRING:
        return {}
    age = {"max_age": EXPIRING_S * 1_000_000_000}
    return age | {"allow_msg_ttl": True} if server >= EXPIRING_SINCE else age


async def _ensure_one(connection: Connection, config: dict[str, Any], update: bool, deadline_s: float) -> None:
    name = config["name"]
    what = f"create stream {name}"
    attempts = retry_until(connection, deadline_s, what)
    verb = "CREATE"
    async for _ in attempts:
        try:
            await call(connection, f"STREAM.{verb}.{name}", config, deadline_s=deadline_s, what=what)
            return
        except ApiError as error:
            no_room = error.code in NO_ROOM  # the server checks for room before it checks if the stream exists
            exists = error.code == Code.STREAM_EXISTS or (no_room and await _exists(connection, name, deadline_s))
            if exists and not update:
                return
            if exists and verb == "CREATE":
                changed = await _changed(connection, config, deadline_s)
                if changed is None:
                    return
                verb, config = "UPDATE", changed
            elif error.code == Code.NO_CLUSTER:
                raise ConfigError(
                    f"{error}: the server is no cluster; start three of them, or set PENSTOCK_STREAM_REPLICAS to 1"
                ) from None
            elif error.code in (Code.STORE_BUSY, Code.NO_PEERS, Code.NO_QUORUM):
                attempts.why = error
            elif no_room:
                raise ConfigError(
                    f"{error}: NATS has no room for {config['max_bytes']} bytes more: lower PENSTOCK_STREAM_BYTES, "
                    "PENSTOCK_EXPERIENCE_BYTES or PENSTOCK_LEDGER_BYTES, or raise max_file_store of the server (by "
                    "default it is three quarters of what was free on its disk at its start)"
                ) from None
            else:
                raise ConfigError(
                    f"{error}: the existing stream does not fit; remove it or use another server"
                ) from None
