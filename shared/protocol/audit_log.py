"""Records of the stream AUDIT: HTTP requests that changed something, with their sender."""

from __future__ import annotations

import msgspec

from penstock.shared.errors import ProtocolError

__all__ = ["AuditRecord", "decode_record", "encode_record"]


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one request. Contains names and ids but no content of the request; users appear under their
    pseudonyms."""

    request: str
    """Request id, `req_` and 32 hex digits; the reply carries it as `x-request-id`."""
    time: float
    """Time at which the reply began (Unix seconds)."""
    key: str
    """Id of the key that sent the request; `local`: the request came from this machine while no keys are configured."""
    key_name: str = ""
    address: str = ""
    """Address of the client, as reported by trusted proxies; '' if the server does not know it."""
    method: str
    route: str
    """Path template of the route."""
    path: dict[str, str] = {}
    """Values of the placeholders in ``route``."""
    query: dict[str, str] = {}
    """Query parameters that the route defines."""
    status: int
    job: str = ""
    """Id of the job that the request concerns or created; '' for none."""
    location: str = ""
    """API path of the resource that the request created."""
    replayed: bool = False
    """True if the request changed nothing, because the reply to an earlier request with its Idempotency-Key was sent
    again."""
    idempotency_key: str = ""
    body_sha256: str = ""
    """SHA-256 of the body as far as it was read, in hex; '' without a body."""
    trace: str = ""


def encode_record(record: AuditRecord) -> bytes:
    """Encode a record for storage: JSON, which other tools can read."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> AuditRecord:
    """Decode a stored record. Raises ProtocolError."""
    try:
        return msgspec.json.decode(data, type=AuditRecord)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a record of the audit log does not decode: {error}") from None
