"""Messages between the reward service and a scorer process: length-prefixed msgpack over a socket pair."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.shared.errors import ProtocolError

__all__ = ["Decoder", "FromProcess", "Open", "Opened", "Result", "Score", "ToProcess", "encode"]

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 256 << 20


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """First message: configs of the scorers (`RewardConfig.scorers`)."""

    scorers: list[dict[str, Any]]


class Score(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """Request to score completions of one prompt in order. The process sends one ``Result`` per completion."""

    prompt: str
    completions: list[str]
    answer: str | None
    row: dict[str, Any]


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """Reply to ``Open``: an error or '', and the scorers' descriptions by name."""

    error: str = ""
    about: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """Result of completion ``index``: a finite score per scorer, or an error and no scores. Scoring took
    ``seconds``."""

    index: int
    scores: list[float]
    error: str
    seconds: float


ToProcess = Open | Score
FromProcess = Opened | Result

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToProcess | FromProcess) -> bytes:
    """Encode one message with a length prefix."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Splits a byte stream into messages."""

    def __init__(self, kind: Any) -> None:
        """Decode messages of ``kind``: ``ToProcess`` or ``FromProcess``."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages completed by ``data``.

        Raises:
            ProtocolError: a message exceeds the size limit or does not decode.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > _MAX_BYTES:
                raise ProtocolError(f"a scorer message of {size} bytes; the limit is {_MAX_BYTES}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"scorer message does not decode: {error}") from None
