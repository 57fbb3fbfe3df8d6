"""Messages to gateways: one per gateway and decode step, and periodic heartbeats."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

from msgspec.structs import replace

from penstock.shared.errors import PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, pack
from penstock.shared.protocol.live.inference import SIGN_EVERY_S, Chunk, Chunks, Failure
from penstock.shared.transport.bus import Bus

__all__ = ["Outbox", "messages_of"]

logger = logging.getLogger(__name__)


class Outbox:
    """Collects chunks, and sends to each gateway one message with all its pending chunks."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus, self._worker = bus, worker
        self._chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
        self._failures: defaultdict[str, list[Failure]] = defaultdict(list)
        self._in_progress: defaultdict[str, set[str]] = defaultdict(set)
        self._new = asyncio.Event()

    def open(self, gateway: str, request: str) -> None:
        """Register a request of ``gateway`` as in progress."""
        self._in_progress[gateway].add(request)

    def put(self, gateway: str, chunk: Chunk) -> None:
        """Queue a chunk."""
        self._chunks[gateway].append(chunk)
        self._new.set()

    def close(self, gateway: str, request: str, failure: Failure | None = None) -> None:
        """Unregister a request that was answered or failed; queue its ``failure`` if it has one."""
        self._in_progress[gateway].discard(request)
        if failure is not None:
            self._failures[gateway].append(failure)
            self._new.set()

    async def run(self) -> None:
        """Send chunks and heartbeats until cancelled."""
        clock = asyncio.get_running_loop().time
        due = clock() + SIGN_EVERY_S
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._new.wait()
            except TimeoutError:
                pass
            self._new.clear()
            sign = clock() >= due
            await self._send(sign=sign)
            if sign:
                due = clock() + SIGN_EVERY_S

    async def flush(self) -> None:
        """Send pending chunks now."""
        await self._send(sign=False)

    async def _send(self, *, sign: bool) -> None:
        for gateway in {*self._chunks, *self._failures, *(self._in_progress if sign else ())}:
            chunks, failures = self._chunks.pop(gateway, []), self._failures.pop(gateway, [])
            in_hand = sorted(self._in_progress[gateway]) if sign else None
            try:
                for message in messages_of(Chunks(self._worker, chunks, failures, in_hand)):
                    await self._bus.notify(subjects.inference_chunks(gateway), message)
            except PenstockError as error:  # the gateway detects the gap and asks elsewhere
                logger.warning("%d chunks for gateway %s are lost: %s", len(chunks), gateway, error)
            if not self._in_progress[gateway]:
                del self._in_progress[gateway]


def messages_of(chunks: Chunks) -> list[bytes]:
    """Encode chunks as one message, or as several if one message would be too large (top log-probs make answers
    long)."""
    data = pack(chunks)
    if len(data) <= MAX_INLINE_BYTES:
        return [data]
    if len(chunks.chunks) == 1:
        (only,) = chunks.chunks
        if only.start < 0 or len(only.token_ids) < 2:  # an echoed prompt is not split
            return [data]
        chunks = Chunks(chunks.worker, _halves(only), chunks.failures, chunks.in_hand)
    middle = len(chunks.chunks) // 2
    first = Chunks(chunks.worker, chunks.chunks[:middle])
    return messages_of(first) + messages_of(
        Chunks(chunks.worker, chunks.chunks[middle:], chunks.failures, chunks.in_hand)
    )


def _halves(chunk: Chunk) -> list[Chunk]:
    """Split a chunk in two; text and finish reason go with the second half."""
    middle = len(chunk.token_ids) // 2
    first = Chunk(
        chunk.request, chunk.choice, chunk.start, chunk.token_ids[:middle], chunk.logprobs[:middle], chunk.version,
        pieces=chunk.pieces[:middle], top=chunk.top[:middle],
    )  # fmt: skip
    rest = replace(
        chunk, start=chunk.start + middle, token_ids=chunk.token_ids[middle:], logprobs=chunk.logprobs[middle:],
        pieces=chunk.pieces[middle:], top=chunk.top[middle:],
    )  # fmt: skip
    return [first, rest]
