"""Tables of posted items and their status: a SQLite file that can be deleted at any time and is then rebuilt.

Each process locks one file, the first free one of a numbered series in the data directory. So a restarted process finds
a complete file, which it or another process has written. The file stores how far each stream was read.

The file contains no user and no text, because SQLite leaves copies of rows behind when it splits pages, also with
secure_delete.
"""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.services.coordinator.feedback.ingest import Known
from penstock.shared.protocol.live.interaction import Erasure, Feedback, FeedbackStatus, InteractionStatus

__all__ = ["LeaderEpochs", "Place", "Projection", "Target", "drop_abandoned", "open_projection"]

log = logging.getLogger(__name__)

SCHEMA = 4
"""Schema version; files of another version are rebuilt."""
MAX_FILES = 64
CHECKPOINTS, CHECKPOINT_S = 3, 0.5
"""Number of attempts to remove deleted rows from the write-ahead log, and the pause between them (seconds)."""
CHUNK = 256
"""Maximum number of ids in one query."""

Place = tuple[str, str, int]
"""``(stream, its creation time, stream sequence number up to which it was read)``."""
Target = tuple[str, str, int]
"""Target of feedback: (interaction, its episode or '' if that is no UUID, stream sequence number of its message), or
(episode, '', 0)."""

CACHE = "cache_size = -65536"
"""Page cache of 64 MiB. Ids are random, so every item touches another page: with 2 MiB, half as many items per second
are written."""

_TABLES = """
CREATE TABLE IF NOT EXISTS place (stream TEXT PRIMARY KEY, created TEXT NOT NULL, seq INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS feedback (
  id TEXT PRIMARY KEY, job TEXT NOT NULL DEFAULT '', kind TEXT NOT NULL DEFAULT '', metric TEXT NOT NULL DEFAULT '',
  source TEXT NOT NULL DEFAULT '', revision INTEGER NOT NULL DEFAULT 0,
  fingerprint TEXT NOT NULL DEFAULT '', seq INTEGER NOT NULL DEFAULT 0, received REAL NOT NULL DEFAULT 0,
  retracted INTEGER NOT NULL DEFAULT 0, status TEXT NOT NULL DEFAULT 'received', reason TEXT NOT NULL DEFAULT '',
  interactions TEXT NOT NULL DEFAULT '', ordinal INTEGER NOT NULL DEFAULT -1, batch INTEGER NOT NULL DEFAULT 0,
  version INTEGER NOT NULL DEFAULT 0, time REAL NOT NULL DEFAULT 0, late INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS funnel ON feedback (job, metric, source, status);
CREATE INDEX IF NOT EXISTS held ON feedback (id) WHERE status = 'quarantined';
CREATE TABLE IF NOT EXISTS target (
  id TEXT PRIMARY KEY, episode TEXT NOT NULL DEFAULT '', seq INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turns ON target (episode, seq) WHERE episode != '';
CREATE TABLE IF NOT EXISTS decided (
  id TEXT PRIMARY KEY, job TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, ordinal INTEGER NOT NULL,
  batch INTEGER NOT NULL, version INTEGER NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS outcomes ON decided (job, status, reason);
CREATE TABLE IF NOT EXISTS erased (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leader (job TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
"""


def _columns(count: int) -> str:
    """Return SQL that extracts ``count`` columns from the parameter ``?1``, a JSON array of rows, each an array."""
    return ", ".join(f"json_extract(value, '$[{place}]')" for place in range(count))


_REMAINS = "json_extract(value, '$[0]') NOT IN (SELECT id FROM erased)"
"""Condition for rows that are not erased. Streams are read independently, so an id may still appear in one stream after
its deletion was read from another."""

# One statement writes all rows: sqlite3 releases the interpreter lock at every step, and while the event loop is busy,
# gets it back only after the switch interval. Row by row that is a few hundred rows per second.
_POST = f"""
INSERT INTO feedback (id, job, kind, metric, source, revision, fingerprint, seq, received, time)
SELECT {_columns(10)} FROM json_each(?1) WHERE true
ON CONFLICT (id) DO UPDATE SET job = excluded.job, kind = excluded.kind, metric = excluded.metric,
  source = excluded.source, revision = excluded.revision, fingerprint = excluded.fingerprint,
  seq = excluded.seq, received = excluded.received, time = max(feedback.time, excluded.received)
WHERE feedback.fingerprint = '' OR (excluded.revision > feedback.revision AND excluded.source = feedback.source)
  OR excluded.fingerprint = feedback.fingerprint
"""
_KEPT = f"""
INSERT INTO feedback (id, job, kind, metric, source, revision, fingerprint, seq, received, time)
SELECT {_columns(10)} FROM json_each(?1) WHERE {_REMAINS}
ON CONFLICT (id) DO UPDATE SET job = excluded.job, kind = excluded.kind, metric = excluded.metric,
  source = excluded.source, revision = excluded.revision, fingerprint = excluded.fingerprint,
  seq = excluded.seq, received = excluded.received, time = max(feedback.time, excluded.received)
WHERE feedback.fingerprint = ''
"""
_STATUS = f"""
INSERT INTO feedback (id, status, reason, interactions, ordinal, batch, version, time)
SELECT {_columns(8)} FROM json_each(?1) WHERE {_REMAINS}
ON CONFLICT (id) DO UPDATE SET status = excluded.status, reason = excluded.reason, time = excluded.time,
  interactions = excluded.interactions, ordinal = excluded.ordinal, batch = excluded.batch, version = excluded.version
"""
_LATE = f"""
INSERT INTO feedback (id, late) SELECT {_columns(2)} FROM json_each(?1) WHERE {_REMAINS}
ON CONFLICT (id) DO UPDATE SET late = max(feedback.late, excluded.late)
"""
_TARGET = f"""
INSERT INTO target (id, episode, seq) SELECT {_columns(3)} FROM json_each(?1) WHERE {_REMAINS}
ON CONFLICT (id) DO UPDATE SET episode = excluded.episode, seq = excluded.seq
WHERE target.episode = '' AND excluded.episode != ''
"""
_DECIDED = f"""
INSERT INTO decided (id, job, status, reason, ordinal, batch, version, time)
SELECT {_columns(8)} FROM json_each(?1) WHERE {_REMAINS}
ON CONFLICT (id) DO UPDATE SET status = excluded.status, reason = excluded.reason, ordinal = excluded.ordinal,
  batch = excluded.batch, version = excluded.version, time = excluded.time WHERE excluded.ordinal >= 0
"""
_PLACE = f"INSERT OR REPLACE INTO place (stream, created, seq) SELECT {_columns(3)} FROM json_each(?1)"
_LEADER = f"INSERT OR REPLACE INTO leader (job, epoch) SELECT {_columns(2)} FROM json_each(?1)"
_RETRACT = f"""
INSERT INTO feedback (id, retracted) SELECT {_columns(2)} FROM json_each(?1) WHERE {_REMAINS}
ON CONFLICT (id) DO UPDATE SET retracted = 1
"""
_ERASED = f"INSERT OR IGNORE INTO erased (id) SELECT {_columns(1)} FROM json_each(?1)"
_LEFT = """
DELETE FROM target WHERE seq = 0 AND id IN (SELECT episode FROM target WHERE id IN (SELECT id FROM erased))
  AND NOT EXISTS (
    SELECT 1 FROM target AS turn WHERE turn.episode = target.id AND turn.id NOT IN (SELECT id FROM erased)
  )
"""
"""Deletes episodes whose turns are all erased. Must run before the erased turns are deleted from ``target``."""
_DELETE = f"DELETE FROM {{}} WHERE id IN (SELECT {_columns(1)} FROM json_each(?1))"


def open_projection(directory: Path) -> Projection:
    """In ``directory``, find the first database file that no other process has locked, lock it and open it. Rebuild the
    file if it is damaged."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(MAX_FILES):
        lock = (directory / f"feedback-{number}.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        path = directory / f"feedback-{number}.sqlite"
        try:
            return Projection(path, lock)
        except sqlite3.DatabaseError as error:
            log.warning("%s is built anew: %s", path, error)
            _remove(path)
            return Projection(path, lock)
    raise OSError(f"{MAX_FILES} processes hold a projection in {directory}")


def drop_abandoned(directory: Path) -> None:
    """Delete the database files that no process has locked. Their processes have ended, so a user's data would stay in
    these files even after its deletion."""
    for path in directory.glob("feedback-*.sqlite"):
        with path.with_suffix(".lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            _remove(path)


def _remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink(missing_ok=True)


class LeaderEpochs:
    """The newest leader epoch of each job in DECISIONS; later messages of an earlier leader are ignored."""

    def __init__(self, epochs: Mapping[str, int] | None = None) -> None:
        self.epochs = dict(epochs or {})

    def is_gone(self, job: str, epoch: int) -> bool:
        """Return True if a leader of the job with an epoch above ``epoch`` has published already; else record ``epoch``
        and return False. Messages that no leader sent have epoch 0."""
        newest = self.epochs.get(job, 0)
        if 0 < epoch < newest:
            return True
        self.epochs[job] = max(epoch, newest)
        return False


class Projection:
    """The tables of one file. One thread writes and another reads; neither is the thread of the event loop."""

    def __init__(self, path: Path, lock: IO[bytes] | None = None) -> None:
        self.path = path
        self._lock = lock
        self._writer = _connect(path)
        try:
            self._check()
        except sqlite3.DatabaseError:
            self._writer.close()
            raise
        with self._writer:
            self._writer.executescript(_TABLES)
            self._writer.execute(f"PRAGMA user_version = {SCHEMA}")
        self.leaders = LeaderEpochs(dict(self._writer.execute("SELECT job, epoch FROM leader")))
        self._reader = _connect(path)

    def _check(self) -> None:
        """Raise sqlite3.DatabaseError if the file is damaged, or has another schema version."""
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        tables = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version != SCHEMA and (version or tables):
            raise sqlite3.DatabaseError(f"schema {version}, this build writes {SCHEMA}")
        flaw = self._writer.execute("PRAGMA quick_check(1)").fetchone()[0]
        if flaw != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {flaw}")

    def discard(self) -> None:
        """Delete the database file, and release its lock."""
        self._reader.close()
        self._writer.close()
        _remove(self.path)
        if self._lock is not None:
            self._lock.close()

    def close(self) -> None:
        """Close the file, and release its lock."""
        self._reader.close()
        self._writer.close()
        if self._lock is not None:
            self._lock.close()

    def places(self) -> dict[str, Place]:
        """Return, for each stream, the position up to which the stream was read."""
        return {row[0]: tuple(row) for row in self._writer.execute("SELECT stream, created, seq FROM place")}

    def clear(self) -> None:
        """Delete all rows, because the streams were replaced."""
        with self._writer:
            for table in ("place", "feedback", "target", "decided", "erased", "leader"):
                self._writer.execute(f"DELETE FROM {table}")
        self.leaders.epochs.clear()

    def apply(
        self,
        posts: Iterable[tuple[int, Feedback]],
        statuses: Iterable[FeedbackStatus],
        erasures: Sequence[Erasure],
        targets: Iterable[Target],
        places: Iterable[Place],
        *,
        decided: Iterable[tuple[str, InteractionStatus]] = (),
        kept: Iterable[tuple[int, Feedback]] = (),
        epochs: Mapping[str, int] | None = None,
    ) -> None:
        """Write the contents of messages, and the positions up to which streams are now read, in one transaction.

        Args:
            posts: items of feedback, each with the stream sequence number of its message.
            places: new position in each stream.
            decided: statuses of interactions, each with its job.
            kept: like ``posts``, for items of which only the ids are still stored.
            epochs: newest leader epoch by job.
        """
        posts, statuses, epochs = list(posts), list(statuses), dict(epochs or {})
        retracted = [(item.body.get("feedback", ""), 1) for _, item in posts if item.kind == "retraction"]
        with self._writer:
            self._put(_POST, (_post_row(seq, item) for seq, item in posts))
            self._put(_KEPT, (_post_row(seq, item) for seq, item in kept))
            self._put(_RETRACT, retracted)
            self._put(_STATUS, (_status_row(item) for item in statuses if not item.revision))
            self._put(_LATE, ((item.feedback, item.revision) for item in statuses if item.revision))
            self._put(_DECIDED, (_decided_row(job, item) for job, item in decided))
            self._put(_TARGET, targets)
            for erasure in erasures:
                feedback, interactions = ([(id,) for id in ids] for ids in (erasure.feedback, erasure.interactions))
                self._put(_ERASED, feedback + interactions)
                self._put(_DELETE.format("feedback"), feedback)
                self._writer.execute(_LEFT)
                for table in ("target", "decided"):
                    self._put(_DELETE.format(table), interactions)
            self._put(_LEADER, epochs.items())
            self._put(_PLACE, places)
        self.leaders.epochs.update(epochs)
        if erasures:
            self._empty_log()

    def _empty_log(self) -> None:
        """Remove deleted rows from the write-ahead log. Raises sqlite3.OperationalError if readers prevent that."""
        for _ in range(CHECKPOINTS):
            if not self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                return
            time.sleep(CHECKPOINT_S)
        raise sqlite3.OperationalError("the log of the feedback index still holds what was deleted: somebody reads it")

    def _put(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        if some := list(rows):
            self._writer.execute(statement, (msgspec.json.encode(some).decode(),))

    def known(self, ids: Sequence[str]) -> dict[str, Known]:
        """Return the stored items among ``ids``, by id, except those whose content hash is unknown."""
        query = "SELECT id, fingerprint, revision, seq, source FROM feedback WHERE fingerprint != '' AND id IN ({})"
        return {row[0]: Known(row[1], row[2], row[3], row[4]) for row in self._in(query, ids)}

    def targets(self, ids: Sequence[str]) -> set[str]:
        """Return those of ``ids`` that are interactions or episodes."""
        return {row[0] for row in self._in("SELECT id FROM target WHERE id IN ({})", ids)}

    def episodes(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the episode of each interaction of ``ids`` that is recorded in an episode."""
        query = "SELECT id, episode FROM target WHERE episode != '' AND id IN ({})"
        return {row[0]: row[1] for row in self._in(query, ids)}

    def turns(self, episode: str, after: str, limit: int) -> list[str]:
        """Return at most ``limit`` interactions of an episode recorded later than ``after`` ('': from the first on), in
        order."""
        query = """
        SELECT id FROM target WHERE episode = ?1 AND seq > coalesce((SELECT seq FROM target WHERE id = ?2), 0)
        ORDER BY seq LIMIT ?3
        """
        return [row[0] for row in self._reader.execute(query, (episode, after, limit))]

    def some_targets(self, limit: int) -> list[str]:
        """Return at most ``limit`` interactions and episodes."""
        return [row[0] for row in self._writer.execute("SELECT id FROM target LIMIT ?", (limit,))]

    def all_erased(self) -> set[str]:
        """Return the ids that were deleted at users' requests."""
        return {row[0] for row in self._writer.execute("SELECT id FROM erased")}

    def status_of(self, id: str) -> dict[str, Any] | None:
        """Return the row of an item, or None if it is unknown."""
        cursor = self._reader.execute("SELECT * FROM feedback WHERE id = ? AND fingerprint != ''", (id,))
        row = cursor.fetchone()
        if row is None:
            return None
        found = dict(zip((column[0] for column in cursor.description), row, strict=True))
        return {**found, "interactions": found["interactions"].split()}

    def decided(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the decisions on the interactions in ``ids``, by id; leave out undecided interactions."""
        query = "SELECT id, status, reason, ordinal, batch, version, time FROM decided WHERE id IN ({})"
        names = ("status", "reason", "ordinal", "batch", "version", "time")
        return {row[0]: dict(zip(names, row[1:], strict=True)) for row in self._in(query, ids)}

    def outcomes(self, job: str) -> list[tuple[str, str, int]]:
        """Return ``(status, reason, number of interactions)`` for the decided interactions of a job."""
        query = "SELECT status, reason, count(*) FROM decided WHERE job = ? GROUP BY 1, 2 ORDER BY 1, 2"
        return list(self._reader.execute(query, (job,)))

    def held(self, jobs: Sequence[str] | None, after: str, limit: int) -> list[dict[str, Any]]:
        """Return quarantined items of ``jobs`` (of all jobs if None) with ids above ``after``, in the order of ids."""
        names = ("id", "job", "metric", "source", "reason", "received", "time")
        query = """
        SELECT id, job, metric, source, reason, received, time FROM feedback INDEXED BY held
        WHERE (?1 IS NULL OR job IN (SELECT value FROM json_each(?1)))
        AND status = 'quarantined' AND fingerprint != '' AND id > ?2 ORDER BY id LIMIT ?3
        """
        wanted = None if jobs is None else json.dumps(list(jobs))
        return [dict(zip(names, row, strict=True)) for row in self._reader.execute(query, (wanted, after, limit))]

    def funnel(self, job: str) -> list[tuple[str, str, str, int]]:
        """Return ``(metric or kind, source, status, number of items)`` for the feedback of a job.

        Items that only act on other items, or only end an episode (`metric` without a metric), are not counted.
        """
        query = """
        SELECT CASE metric WHEN '' THEN kind ELSE metric END, source, status, count(*) FROM feedback
        WHERE job = ? AND kind NOT IN ('retraction', 'release', 'drop') AND NOT (kind = 'metric' AND metric = '')
        GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
        """
        return list(self._reader.execute(query, (job,)))

    def _in(self, query: str, ids: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(ids), CHUNK):
            some = ids[start : start + CHUNK]
            yield from self._reader.execute(query.format(",".join("?" * len(some))), some)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, timeout=30.0)
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON", "busy_timeout = 30000", CACHE):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _post_row(seq: int, item: Feedback) -> tuple[Any, ...]:
    return (
        item.id, item.job, item.kind, item.metric, item.key_id, item.revision, item.fingerprint, seq,
        item.received, item.received,
    )  # fmt: skip


def _decided_row(job: str, item: InteractionStatus) -> tuple[Any, ...]:
    return item.interaction, job, item.status, item.reason, item.ordinal, item.batch, item.version, item.time


def _status_row(item: FeedbackStatus) -> tuple[Any, ...]:
    interactions = " ".join(item.interactions)
    return item.feedback, item.status, item.reason, interactions, item.ordinal, item.batch, item.version, item.time
