"""Serializes a fold of the ledger, so that a new leader need not start from the first event. Pure.

A snapshot is a cache. It names the ledger entry that it covers, by stream sequence number and by digest, and the code
version of the fold; a reader that cannot verify one of these ignores the snapshot and folds the ledger.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

import msgspec
import xxhash

from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import pack, unpack

__all__ = ["FOLD", "Snapshot", "decode_snapshot", "digest_of", "encode_snapshot"]

FOLD = 5
"""Version of the fold's code. Raise it with any change after which the same events produce another state."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state after ledger entry ``seq``; ``entry`` is the digest of that entry.

    The envelope has the epoch of the entry's writer. ``fold`` and ``layout`` identify the code that made the snapshot,
    ``digest`` is the xxh3-128 of all other fields.
    """

    seq: int
    entry: str
    fold: int
    layout: str
    digest: str
    state: bytes


def digest_of(data: bytes) -> str:
    """Return the digest of a ledger entry."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_snapshot(state: LedgerState, *, job: str, seq: int, entry: str) -> bytes:
    """Return the message that contains ``state``, the fold up to ledger entry ``seq`` with digest ``entry``."""
    data = msgspec.msgpack.encode(state)
    snapshot = Snapshot(seq=seq, entry=entry, fold=FOLD, layout=_LAYOUT, digest="", state=data)
    snapshot = msgspec.structs.replace(snapshot, digest=_digest(snapshot, job))
    return pack(snapshot, job=job, id=str(seq), epoch=state.epoch)


def decode_snapshot(data: bytes, *, job: str) -> tuple[Snapshot, LedgerState]:
    """Decode the result of ``encode_snapshot``; return the snapshot and its state.

    Raises:
        ProtocolError: it cannot be verified: of another job, fold or layout, damaged, or with an invalid state.
    """
    snapshot, envelope = unpack(data, Snapshot)
    if envelope.job != job:
        raise ProtocolError(f"it is of job '{envelope.job}'")
    if (snapshot.fold, snapshot.layout) != (FOLD, _LAYOUT):
        raise ProtocolError(f"it was made by fold {snapshot.fold}-{snapshot.layout}; this is {FOLD}-{_LAYOUT}")
    if _digest(snapshot, job) != snapshot.digest:
        raise ProtocolError("it does not hash to its digest")
    try:
        state = _decoder.decode(snapshot.state)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"its state does not decode: {error}") from None
    if state.epoch != envelope.epoch or not state.balanced():
        raise ProtocolError(f"its state is not sound: epoch {state.epoch} of {envelope.epoch}")
    return snapshot, state


def _digest(snapshot: Snapshot, job: str) -> str:
    facts = f"{job}:{snapshot.seq}:{snapshot.entry}:{snapshot.fold}:{snapshot.layout}:".encode()
    return xxhash.xxh3_128_hexdigest(facts + snapshot.state)


def _describe(kind: type[Any], known: dict[str, str]) -> dict[str, str]:
    """Return class name -> fields, for the class ``kind`` and every dataclass and struct in the types of its fields."""
    if kind.__name__ not in known and (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        hints = get_type_hints(kind)
        known[kind.__name__] = str({name: str(hint) for name, hint in hints.items()})
        for hint in hints.values():
            for inner in _classes(hint):
                _describe(inner, known)
    return known


def _classes(hint: Any) -> list[type[Any]]:
    inside = [inner for argument in get_args(hint) for inner in _classes(argument)]
    return [hint] if isinstance(hint, type) and not get_args(hint) else inside


def _counter(type_: Any, value: Any) -> Any:
    if getattr(type_, "__origin__", None) is Counter:
        return Counter(value)
    raise NotImplementedError


_LAYOUT = xxhash.xxh3_64_hexdigest(str(_describe(LedgerState, {})).encode())
"""Digest of all field names and types of a ``LedgerState``, so that no snapshot with other fields is ever decoded."""
_decoder: msgspec.msgpack.Decoder[LedgerState] = msgspec.msgpack.Decoder(LedgerState, dec_hook=_counter)
