"""Requests over HTTP that changed something and who made them: the records of AUDIT."""

from __future__ import annotations

import msgspec

from penstock.shared.errors import ProtocolError

__all__ = ["AuditRecord", "decode_record", "encode_record"]


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. It holds names and ids and nothing of what was sent; users stand under their pseudonyms."""

    request: str
    """Its own id, `req_` and 32 hex digits; the reply has it as `x-request-id`."""
    time: float
    """When the reply began (Unix seconds)."""
    key: str
    """Id of the key that sent it; `local`: from this machine, where no keys are configured."""
    key_name: str = ""
    address: str = ""
    """Of the client, as far as proxies are believed; '' where the server knows none."""
    method: str
    route: str
    """Template of the path."""
    path: dict[str, str] = {}
    """Values of the template's places."""
    query: dict[str, str] = {}
    """Parameters that the route knows."""
    status: int
    job: str = ""
    """The job that it is about, or that it made; '' for none."""
    location: str = ""
    """Path of what it made."""
    replayed: bool = False
    """An earlier request with this Idempotency-Key was answered again; nothing was done."""
    idempotency_key: str = ""
    body_sha256: str = ""
    """Of the body as far as it was read, in hex; '' where there was none."""
    trace: str = ""


def encode_record(record: AuditRecord) -> bytes:
    """As stored: JSON, which other tools read, too."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> AuditRecord:
    """A stored record. Raises ProtocolError."""
    try:
        return msgspec.json.decode(data, type=AuditRecord)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a record of the audit log does not decode: {error}") from None
