"""Ledger events: the decisions of a job, in order. The ledger is the only commit point.

An event records one decision (a range, a batch), never one group. Folding the events from the start gives the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.events.base import Event
from penstock.shared.protocol.events.online import (
    Admission,
    Admitted,
    CanaryBegun,
    CanaryJudged,
    Decided,
    EndedFeedback,
    EndedInteractions,
    Judged,
    PackedIds,
    Promoted,
    PromotionRefused,
    Quarantined,
)
from penstock.shared.protocol.events.training import (
    BatchRefused,
    BatchSealed,
    BatchTrained,
    BestCheckpoint,
    Checkpointed,
    Drawn,
    Dropped,
    Extended,
    Finished,
    Hyperparameters,
    JobStarted,
    LineageForked,
    PhaseChanged,
    Redrawn,
    SealedGroup,
    SettingsChanged,
    Tracking,
)

__all__ = [
    "Admission",
    "Admitted",
    "BatchRefused",
    "BatchSealed",
    "BatchTrained",
    "BestCheckpoint",
    "CanaryBegun",
    "CanaryJudged",
    "Checkpointed",
    "Decided",
    "Drawn",
    "Dropped",
    "EndedFeedback",
    "EndedInteractions",
    "Event",
    "Extended",
    "Finished",
    "Hyperparameters",
    "JobStarted",
    "Judged",
    "LineageForked",
    "PackedIds",
    "PhaseChanged",
    "Promoted",
    "PromotionRefused",
    "Quarantined",
    "Redrawn",
    "SealedGroup",
    "SettingsChanged",
    "Tracking",
    "decode_events",
    "encode_events",
]

AnyEvent = (
    JobStarted | SettingsChanged | Redrawn | Drawn | Admitted | Dropped | BatchSealed | BatchRefused | BatchTrained
    | Checkpointed | BestCheckpoint | LineageForked | PhaseChanged | Finished | Promoted | PromotionRefused
    | Quarantined | Decided | CanaryBegun | CanaryJudged | Extended
)  # fmt: skip

_decoder = msgspec.msgpack.Decoder(list[AnyEvent])


def encode_events(events: Sequence[Event]) -> bytes:
    """Encode one ledger entry: the events of one atomic decision, in order."""
    return msgspec.msgpack.encode(list(events))


def decode_events(data: bytes) -> list[Event]:
    """Inverse of ``encode_events``.

    Raises:
        ProtocolError: the data is not a ledger entry of this version.
    """
    try:
        return list(_decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"ledger entry does not decode: {error}") from None
