"""Episodes, stored in a bucket so that every replica knows which episodes have ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from datetime import timedelta

from pydantic import ValidationError

from penstock.services.coordinator.serving.models import Served
from penstock.services.coordinator.shares import EntryShares
from penstock.shared.errors import Conflict, Gone, NotFound, QuotaUsed, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.episode import KEEP_S, EpisodeRecord
from penstock.shared.protocol.live.interaction import (
    Feedback,
    FeedbackBatch,
    bare_id,
    job_mark,
    marked_id,
    new_marked_id,
)
from penstock.shared.transport.bus import Bus

__all__ = ["Episodes"]

TRUST_S = 1.0
"""Seconds for which a looked-up episode is cached."""
RETRY_S = 1.0
MAX_KNOWN = 16384


class Episodes:
    """Episodes that clients opened through the API. Every method may raise Unavailable."""

    def __init__(self, bus: Bus, share: float = 1.0) -> None:
        """``share``: fraction of the bucket's free space that one key may occupy."""
        self._bus, self._kv = bus, bus.kv(subjects.EPISODES)
        self._shares = EntryShares(share)
        self._max_bytes = 0
        self._known: dict[str, tuple[float, EpisodeRecord | None]] = {}

    async def run(self) -> None:
        """Track how much of the bucket each key occupies, until cancelled."""
        while not self._max_bytes:
            try:
                self._max_bytes = (await self._bus.stream_state(f"KV_{subjects.EPISODES}")).max_bytes
            except Unavailable:
                await asyncio.sleep(RETRY_S)
        async for entry in self._kv.watch(""):
            if entry.value is None:
                self._shares.remove(entry.key)
                continue
            with contextlib.suppress(ValidationError):
                record = EpisodeRecord.model_validate_json(entry.value)
                self._shares.put(entry.key, record.key_id, len(entry.value), self.remembered_until(record))
            self._shares.max_bytes = self._max_bytes

    async def create(self, served: Served, key_id: str, ttl_s: float, about: dict[str, object]) -> EpisodeRecord:
        """Open an episode; ``about``: split, group_id, user (a pseudonym) and tags.

        Raises:
            QuotaUsed: the key has used up its share of the bucket.
        """
        now = bus_datetime()
        record = EpisodeRecord.model_validate(
            {
                **about, "id": f"ep_{new_marked_id(served.job)}", "job": served.job, "model": served.name,
                "key_id": key_id, "created_at": now, "expires_at": now + timedelta(seconds=ttl_s),
            }
        )  # fmt: skip
        data, key = record.model_dump_json().encode(), _key(served.job, record.id)
        if not self._shares.has_room(key_id, len(data)):
            detail = (
                f"this key has opened so many episodes that others need what is left: they are kept for {KEEP_S:g} s"
            )
            raise QuotaUsed("episode_quota", detail)
        await self._kv.create(key, data, keep_s=ttl_s + KEEP_S)
        self._shares.put(key, key_id, len(data), self.remembered_until(record))
        return record

    async def get(self, served: Served, id: str) -> EpisodeRecord:
        """Return the record of an episode. Raises NotFound."""
        record = await self._read(served.job, id)
        if record is None:
            raise NotFound(f"model '{served.name}' has no episode '{id[:80]}'")
        return record

    async def list_all(self, served: Served) -> list[EpisodeRecord]:
        """Return all episodes of a model, oldest first."""
        entries = await self._kv.entries(served.job)
        found = [EpisodeRecord.model_validate_json(entry.value) for entry in entries if entry.value is not None]
        return sorted(found, key=lambda record: record.id)

    def remembered_until(self, record: EpisodeRecord) -> float:
        """Return the Unix time in seconds after which the record of an episode expires."""
        return (record.ended_at or record.expires_at).timestamp() + KEEP_S

    async def end(self, served: Served, id: str) -> EpisodeRecord:
        """End an episode and publish its end to the feedback stream. Safe to repeat.

        Raises:
            NotFound: no such episode.
        """
        key = _key(served.job, id)
        while True:
            entry = await self._kv.get(key)
            if entry is None or entry.value is None:
                raise NotFound(f"model '{served.name}' has no episode '{id[:80]}'")
            record = EpisodeRecord.model_validate_json(entry.value)
            if record.ended_at is None:
                record = record.model_copy(update={"ended_at": bus_datetime()})
                try:
                    await self._kv.update(key, record.model_dump_json().encode(), entry.revision, keep_s=KEEP_S)
                except Conflict:
                    continue
            self._known.pop(key, None)
            await self._tell_the_end(record)
            return record

    async def opened(self, served: Served, id: str) -> EpisodeRecord | None:
        """Return the record of an active episode; None if no such episode of this job was opened.

        Raises:
            Gone: the episode has ended or expired.
        """
        marked = marked_id(id)
        if marked is None or marked[1] != job_mark(served.job):
            return None
        key, now = _key(served.job, id), time.monotonic()
        until, record = self._known.get(key, (0.0, None))
        if until < now:
            record = await self._read(served.job, id)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = now + TRUST_S, record
        if record is not None and record.over:
            what = "has ended" if record.ended_at is not None else "has expired"
            raise Gone("episode_over", f"episode '{id}' {what}: open another one")
        return record

    async def _read(self, job: str, id: str) -> EpisodeRecord | None:
        if bare_id(id) is None:
            return None
        entry = await self._kv.get(_key(job, id))
        if entry is None or entry.value is None:
            return None
        return EpisodeRecord.model_validate_json(entry.value)

    async def _tell_the_end(self, record: EpisodeRecord) -> None:
        episode = bare_id(record.id) or record.id
        end = Feedback(
            id=str(uuid.uuid5(uuid.UUID(episode), "end")), job=record.job, kind="metric", key_id=record.key_id,
            received=bus_time(), episode=episode, final=True,
        )  # fmt: skip
        data = pack(FeedbackBatch(items=[end]), job=record.job)
        await self._bus.publish(subjects.feedback(record.job), data, msg_id=end.id)


def _key(job: str, id: str) -> str:
    return f"{job}.{bare_id(id) or 'none'}"
