"""Streamed replies for both clients: resumable events, JSON lines, files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from penstock.client.answers import error_of, unreachable
from penstock.client.calls import Row, show
from penstock.client.download import Download
from penstock.client.patience import Patience
from penstock.shared.errors import NotFound, PenstockError, ProtocolError, Unavailable

__all__ = ["AsyncStreams", "EventReader", "Place", "Received", "Streams"]


Place = int | str
"""Position in a stream: the number of the last event, or a cursor."""


@dataclass(frozen=True)
class Received:
    """One event; ``row`` is its data."""

    id: Place | None
    type: str
    row: dict[str, object]


class EventReader:
    """Parser of server-sent events that keeps the last id for the next connection.

    If the start position is a number, ids are numbers, and events that are repeated after a reconnect are skipped.
    """

    def __init__(self, after: Place = 0) -> None:
        self.last_id = after
        self.ended = False
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> Received | None:
        """Process one line; return the event that it completes, or None.

        Raises:
            Unavailable: the server reports that its source failed; reconnect with ``last_id``.
            NotFound: the server reports that the resource does not exist.
        """
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in self._fields:
                value = f"{self._fields['data']}\n{value}"
            self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        return self._complete(fields) if "data" in fields else None

    def _complete(self, fields: dict[str, str]) -> Received | None:
        kind = fields.get("event", "message")
        try:
            row = orjson.loads(fields["data"])
            place = self._place(fields["id"]) if "id" in fields else None
        except ValueError:
            raise ProtocolError("the event stream holds something that is not an event") from None
        if kind == "end" and place is None:
            self.ended = True
            return None
        if kind == "error" and place is None:
            raise _failure(row)
        if place is not None:
            if isinstance(place, int) and isinstance(self.last_id, int) and place <= self.last_id:
                return None
            self.last_id = place
        return Received(place, kind, row)

    def _place(self, id: str) -> Place:
        return int(id) if isinstance(self.last_id, int) else id


def _failure(row: dict[str, object]) -> PenstockError:
    detail = str(row.get("detail", "the server's source of events failed"))
    return NotFound(detail) if row.get("code") == "not_found" else Unavailable(detail)


_RECONNECT_S = 0.5
_SILENCE_S = 45.0
"""Read timeout in seconds; the server pings every 15 s."""
_PAST_THE_END = 416
"""HTTP status of the reply if the part file is at least as long as the whole file, so that no rest can be sent."""
_JSON = {"Content-Type": "application/json"}


class Streams:
    """Reader of streams over ``http``. Resumable streams tolerate an unreachable server for ``patience_s``."""

    def __init__(self, http: httpx.Client, url: str, timeout_s: float, patience_s: float) -> None:
        self._http, self._url = http, url
        self._timeout_s, self._patience_s = timeout_s, patience_s

    def follow(self, path: str, after: Place, **params: Any) -> Iterator[Row]:
        """Yield the data of each event after the event ``after``, until the stream ends; reconnect when the connection
        breaks.

        Raises NotFound, Unavailable.
        """
        reader, patience = EventReader(after), Patience(self._patience_s)
        while not reader.ended:
            reader = EventReader(reader.last_id)
            try:
                with contextlib.closing(self._lines(path, reader.last_id, params)) as lines:
                    for line in lines:
                        patience.renew()
                        event = reader.feed(line)
                        if event is not None:
                            yield event.row
                if not reader.ended:
                    time.sleep(_RECONNECT_S)
            except Unavailable as error:
                time.sleep(patience.after(error))

    def rows(self, path: str, body: Row) -> Iterator[Row]:
        """Send a POST request and yield the object on each line of its reply."""
        timeout = httpx.Timeout(self._timeout_s, read=None)
        with self._open("POST", path, content=orjson.dumps(body), headers=_JSON, timeout=timeout) as response:
            for line in response.iter_lines():
                yield orjson.loads(line)

    def fetch(self, downloads: Iterable[Download]) -> None:
        """Complete all downloads. Raises CheckpointError, Unavailable."""
        for download in downloads:
            patience = Patience(self._patience_s)
            while not download.is_done:
                try:
                    self._fetch(download)
                except Unavailable as error:
                    time.sleep(patience.after(error))

    def _fetch(self, download: Download) -> None:
        with download, self._open("GET", download.url, headers=download.headers()) as response:
            if response.status_code == _PAST_THE_END:
                download.start_over()
                return
            download.begin(response.status_code)
            for chunk in response.iter_bytes():
                download.write(chunk)
        download.finish()

    def _lines(self, path: str, after: Place, params: Row) -> Generator[str, None, None]:
        timeout = httpx.Timeout(self._timeout_s, read=_SILENCE_S)
        query = show(path, dict, **params).query()
        with self._open("GET", path, params=query, headers=_resumed(after), timeout=timeout) as response:
            yield from response.iter_lines()

    @contextlib.contextmanager
    def _open(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        """Open a streamed reply that is successful or has status 416; raise the error of any other reply."""
        try:
            with self._http.stream(method, path, **more) as response:
                if not response.is_success and response.status_code != _PAST_THE_END:
                    response.read()
                    raise error_of(response)
                yield response
        except httpx.TransportError as error:
            raise unreachable(self._url, error) from None


class AsyncStreams:
    """Asyncio version of ``Streams``."""

    def __init__(self, http: httpx.AsyncClient, url: str, timeout_s: float, patience_s: float) -> None:
        self._http, self._url = http, url
        self._timeout_s, self._patience_s = timeout_s, patience_s

    async def follow(self, path: str, after: Place, **params: Any) -> AsyncGenerator[Row, None]:
        """See ``Streams.follow``."""
        reader, patience = EventReader(after), Patience(self._patience_s)
        while not reader.ended:
            reader = EventReader(reader.last_id)
            try:
                async with contextlib.aclosing(self._lines(path, reader.last_id, params)) as lines:
                    async for line in lines:
                        patience.renew()
                        event = reader.feed(line)
                        if event is not None:
                            yield event.row
                if not reader.ended:
                    await asyncio.sleep(_RECONNECT_S)
            except Unavailable as error:
                await asyncio.sleep(patience.after(error))

    async def rows(self, path: str, body: Row) -> AsyncGenerator[Row, None]:
        """See ``Streams.rows``."""
        timeout = httpx.Timeout(self._timeout_s, read=None)
        async with self._open("POST", path, content=orjson.dumps(body), headers=_JSON, timeout=timeout) as response:
            async for line in response.aiter_lines():
                yield orjson.loads(line)

    async def fetch(self, downloads: Iterable[Download]) -> None:
        """See ``Streams.fetch``."""
        for download in downloads:
            patience = Patience(self._patience_s)
            while not download.is_done:
                try:
                    await self._fetch(download)
                except Unavailable as error:
                    await asyncio.sleep(patience.after(error))

    async def _fetch(self, download: Download) -> None:
        with download:
            async with self._open("GET", download.url, headers=download.headers()) as response:
                if response.status_code == _PAST_THE_END:
                    download.start_over()
                    return
                download.begin(response.status_code)
                async for chunk in response.aiter_bytes():
                    download.write(chunk)
        download.finish()

    async def _lines(self, path: str, after: Place, params: Row) -> AsyncGenerator[str, None]:
        timeout = httpx.Timeout(self._timeout_s, read=_SILENCE_S)
        query = show(path, dict, **params).query()
        async with self._open("GET", path, params=query, headers=_resumed(after), timeout=timeout) as response:
            async for line in response.aiter_lines():
                yield line

    @contextlib.asynccontextmanager
    async def _open(self, method: str, path: str, **more: Any) -> AsyncIterator[httpx.Response]:
        """Open a streamed reply that is successful or has status 416; raise the error of any other reply."""
        try:
            async with self._http.stream(method, path, **more) as response:
                if not response.is_success and response.status_code != _PAST_THE_END:
                    await response.aread()
                    raise error_of(response)
                yield response
        except httpx.TransportError as error:
            raise unreachable(self._url, error) from None


def _resumed(after: Place) -> dict[str, str]:
    place = {"Last-Event-ID": str(after)} if after != "" else {}
    return {"Accept": "text/event-stream", **place}
