"""Completions of a job, read from its streams: pages of rows, and single completions with every token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.queries.samples import (
    check_env,
    choose_samples,
    sample_detail,
    sample_rows,
    token_texts,
)
from penstock.services.coordinator.training.checkpoints import Checkpoints
from penstock.shared.config.jobs.kinds import trains
from penstock.shared.errors import Conflict, NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.episode_group import decode_any_group
from penstock.shared.protocol.embodied.video import Video, parse_video
from penstock.shared.protocol.events import BatchSealed, BatchTrained, decode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.parts import count_of
from penstock.shared.protocol.trajectory import GroupHeader, parse_group_header
from penstock.shared.runtime.ledger import LedgerArchive, read_ledger
from penstock.shared.transport.bus import Bus

__all__ = ["SampleBrowser", "VideoBrowser"]

Row = dict[str, Any]

_ROW_ID = re.compile(r"(\d{1,15})-(\d{1,15}\.\d{1,18})-(\d{1,6})", re.ASCII)


class SampleBrowser:
    """Reader of groups with completions. Every method may raise Unavailable."""

    def __init__(self, bus: Bus, store: JobStore, checkpoints: Checkpoints, archive: LedgerArchive) -> None:
        self._bus, self._store, self._checkpoints, self._archive = bus, store, checkpoints, archive

    async def page(
        self, job: str, *, step: int | None, limit: int, sort: str | None, after: str | None,
        min_reward: float | None, env: str | None,
    ) -> list[Row]:  # fmt: skip
        """Return a page of completions: of update ``step``, or else of all updates, newest first. The step of an
        evaluation job is 0.

        ``sort``: ``reward``, ``-reward``, ``length``, ``-length`` or None (order in the batch). ``after``: id of the
        last row of the page before. ``env``: only rows whose prompts are from the source of that name. A row has
        ``id``, ``step``, ``draw``, ``index``, ``env``, ``prompt``, ``completion``, ``answer``, ``reward``,
        ``advantage``, ``tokens``, ``min_version``, ``max_version``, ``worker``.

        Raises:
            NotFound: the job is unknown, or it has no source of that name.
        """
        spec = (await self._store.get(job)).spec
        if env is not None:
            check_env(spec, env)
        after = None if after is None else after.removeprefix(f"{job}-")  # ids of an earlier release lack the job
        wanted = partial(_is_wanted, min_reward=min_reward, env=env)
        if trains(spec):
            rows = await self._trained(job, step=step, limit=limit, sort=sort, after=after, wanted=wanted)
        else:
            headers = await self._headers(job)
            chosen = choose_samples(headers, sort=sort, after=after, limit=limit, min_reward=min_reward, env=env)
            rows = await self._evaluated(chosen)
        return [_named(job, row) for row in rows]

    async def one(self, job: str, row_id: str) -> Row:
        """Return one row with tokens, token texts, log-probs, mask, versions, and the ids of the group's other
        completions.

        Raises:
            NotFound: the job or the row is unknown, or the group is purged.
        """
        is_trained = trains((await self._store.get(job)).spec)
        found = _ROW_ID.fullmatch(row_id)
        if found is None:
            raise NotFound(f"'{row_id[:80]}' is no sample: STEP-DRAW-INDEX, as the list of samples shows it")
        step, draw, index = int(found[1]), Draw.parse(found[2]), int(found[3])
        seq = await (self._seq_in_batch(job, step, draw) if is_trained else self._seq_in_stream(job, draw))
        messages = {} if seq is None else await self._bus.get_whole(subjects.EXPERIENCE, [seq])
        if seq is None or seq not in messages:
            raise NotFound(f"sample '{row_id}' of job '{job}' is not there (any more)")
        group = await asyncio.to_thread(decode_any_group, messages[seq].data)
        if index >= group.num_trajectories:
            raise NotFound(f"draw {draw} has {group.num_trajectories} completions, none with index {index}")
        row = _named(job, sample_detail(step, group, index))
        return row | {"token_texts": await self._texts(job, row["token_ids"])} if "token_ids" in row else row

    async def _texts(self, job: str, token_ids: list[int]) -> list[str] | None:
        """Decode tokens with the tokenizer of the initial checkpoint; None if that tokenizer is not on this host."""
        try:
            path, _ = await self._checkpoints.file(job, 0, "tokenizer.json")
            return await asyncio.to_thread(token_texts, path, token_ids)
        except (NotFound, Conflict, OSError, ValueError):
            return None

    async def _trained(
        self, job: str, *, step: int | None, limit: int, sort: str | None, after: str | None,
        wanted: Callable[[Row], bool],
    ) -> list[Row]:  # fmt: skip
        batches = await self._batches(job)
        steps = [step] if step is not None else sorted(batches, reverse=True)
        place = _ROW_ID.fullmatch(after or "")
        if after is not None and place is None:
            return []
        if sort is None and place is not None:  # the previous page ended in this batch
            steps = [number for number in steps if number <= int(place[1])]
        enough = limit if sort is None else limit * 4
        rows: list[Row] = []
        for number in steps:
            batch = batches.get(number)
            if batch is None:
                continue
            messages = await self._bus.get_whole(subjects.EXPERIENCE, [group.seq for group in batch.groups])
            found = [messages[group.seq].data for group in batch.groups if group.seq in messages]
            read = await asyncio.to_thread(_rows_of, number, found)
            if sort is None and place is not None and number == int(place[1]):
                read = _past(read, after)
            rows += [row for row in read if wanted(row)]
            if len(rows) >= enough:
                break
        if sort is not None:
            rows.sort(key=lambda row: float(row["reward" if "reward" in sort else "tokens"]), reverse=sort[0] == "-")
            rows = rows if after is None else _past(rows, after)
        return rows[:limit]

    async def _evaluated(self, chosen: Sequence[tuple[int, str]]) -> list[Row]:
        messages = await self._bus.get_whole(subjects.EXPERIENCE, [seq for seq, _ in chosen])
        found = await asyncio.to_thread(_rows_of, 0, [message.data for message in messages.values()])
        rows = {row["id"]: row for row in found}
        return [rows[row_id] for _, row_id in chosen if row_id in rows]

    async def _headers(self, job: str) -> list[tuple[int, GroupHeader]]:
        headers: list[tuple[int, GroupHeader]] = []
        for message in await self._bus.read(subjects.EXPERIENCE, subjects.experience(job), headers_only=True):
            with contextlib.suppress(ProtocolError):
                headers.append((message.seq, parse_group_header(message.headers)))
        return headers

    async def _batches(self, job: str) -> dict[int, BatchSealed]:
        messages = await read_ledger(self._bus, job, self._archive)
        return await asyncio.to_thread(_trained_of, [message.data for message in messages])

    async def _seq_in_batch(self, job: str, step: int, draw: Draw) -> int | None:
        batch = (await self._batches(job)).get(step)
        return next((group.seq for group in batch.groups if group.draw == draw), None) if batch else None

    async def _seq_in_stream(self, job: str, draw: Draw) -> int | None:
        return next((seq for seq, header in await self._headers(job) if header.draw == draw), None)


class VideoBrowser:
    """Reader of videos of held-out episodes. A full stream VIDEOS drops the oldest videos of all jobs."""

    def __init__(self, bus: Bus, store: JobStore) -> None:
        self._bus, self._store = bus, store

    async def rows(self, job: str) -> list[Row]:
        """Return the videos of held-out episodes, sorted by policy version and reset id. Raises NotFound: unknown job.

        A row has ``name``, ``version``, ``reset_id``, ``task``, ``success``, ``reward`` (return), ``steps``, ``error``
        (why there is no video) and ``href``.
        """
        await self._store.get(job)
        return [
            {
                "name": video.name, "version": video.version, "reset_id": video.reset_id, "task": video.task,
                "success": video.success, "reward": video.total, "steps": video.steps, "error": video.error,
                "href": None if video.error else f"/v1/jobs/{job}/videos/{video.name}",
            }
            for _, video in (await self._newest(job)).values()
        ]  # fmt: skip

    async def data(self, job: str, name: str) -> bytes:
        """Return the bytes of an MP4 file. Raises NotFound."""
        await self._store.get(job)
        seq, video = (await self._newest(job)).get(name, (0, None))
        found = await self._bus.get_whole(subjects.VIDEOS, [seq]) if video is not None and not video.error else {}
        if seq not in found:
            raise NotFound(f"job '{job}' has no video '{name[:80]}' (any more)")
        return found[seq].data

    async def _newest(self, job: str) -> dict[str, tuple[int, Video]]:
        """Return ``(stream sequence number, video)`` of each video by its name, sorted by policy version and reset id.
        If VIDEOS has several messages about a video, the newest counts.

        A message that reports an error never replaces an earlier one.
        """
        found: dict[str, tuple[int, Video]] = {}
        for message in await self._bus.read(subjects.VIDEOS, subjects.videos(job), headers_only=True):
            with contextlib.suppress(ProtocolError):
                video = parse_video(message.headers)
                count_of(message.headers)
                if not video.error or video.name not in found:
                    found[video.name] = message.seq, video
        return dict(sorted(found.items(), key=lambda one: (one[1][1].version, one[1][1].reset_id)))


def _named(job: str, row: Row) -> Row:
    """Return the row with its ids in the form that `GET /v1/samples/{id}` accepts; such ids are unique across jobs."""
    named = {**row, "id": f"{job}-{row['id']}", "href": f"/v1/samples/{job}-{row['id']}"}
    return named | {"siblings": [f"{job}-{id}" for id in row["siblings"]]} if "siblings" in row else named


def _is_wanted(row: Row, *, min_reward: float | None, env: str | None) -> bool:
    good = min_reward is None or (row["reward"] >= min_reward and not row["failed"])
    return good and (env is None or row["env"] == env)


def _past(rows: list[Row], after: str | None) -> list[Row]:
    """Return the rows after the row with id ``after``; none if no row has this id."""
    return list(itertools.dropwhile(lambda row: row["id"] != after, rows))[1:]


def _rows_of(step: int, found: Sequence[bytes]) -> list[Row]:
    return sample_rows(step, [decode_any_group(data) for data in found])


def _trained_of(entries: Sequence[bytes]) -> dict[int, BatchSealed]:
    sealed: dict[int, BatchSealed] = {}
    trained: dict[int, BatchSealed] = {}
    for event in (event for data in entries for event in decode_events(data)):
        if isinstance(event, BatchSealed):
            sealed[event.number] = event
        elif isinstance(event, BatchTrained):
            trained[event.number] = sealed[event.number]
    return trained
