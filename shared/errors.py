"""All exceptions that Penstock raises deliberately.

::

    PenstockError
    ├── ConfigError (ValueError)        the user's file, flag or environment is wrong
    │   └── ConstraintError             a request prescribes a form that no answer can have
    ├── DataError (ValueError)          a data set cannot be read; names the file and the line
    ├── ProtocolError (ValueError)      a message breaks the wire contract; it is dead-lettered, never guessed at
    │   └── FrameError                  a tensor frame is malformed
    ├── DeadlineError (TimeoutError)    a wait timed out; names the awaited event
    ├── Unavailable (ConnectionError)   a service or the bus does not answer
    │   ├── StreamFull                  the stream's byte budget is used up: back off and retry
    │   ├── DiskFull                    the disk of the bus is full: it stores nothing until there is space
    │   └── RankLost                    another process of the same trainer died or hangs: all of them restart
    ├── Fenced                          a writer with a higher epoch took over: step down, write nothing
    ├── Conflict                        the current state does not allow the request (HTTP 409)
    ├── NotFound (KeyError)             no such job, message or checkpoint
    ├── Refused                         a request is refused, for a reason that has a name (``code``)
    │   ├── Invalid                     the request is wrong; says which parts of it
    │   ├── Unauthenticated             the caller gives no credentials, or credentials that are not valid
    │   ├── Forbidden                   the caller lacks the permission for the request
    │   ├── OutOfReach                  the caller has no object of this name: another caller owns it, or it is off
    │   ├── Gone                        the object ended or was deleted: it takes no requests any more
    │   ├── TooLarge                    the request is larger than can be stored
    │   ├── NoRoom                      there is no space to store more, until some is freed
    │   │   └── QuotaUsed               the caller has used up its share of the space: a retry does not help
    │   └── RetryLater                  the request cannot be served now; retry it after a given time
    │       └── RateLimited             the sender sends more than is accepted: slow down, retry after a given time
    ├── Unsupported                     this simulator does not offer the operation
    ├── WeightsError                    a weight transfer failed; the engine keeps its old version
    │   └── UnreadableWeights           this process supports no transport of a version; a retry does not help
    ├── CheckpointError                 a checkpoint is missing, partial, or of another job or model
    ├── ArchiveError                    a segment of an archived ledger is missing or was changed
    ├── ScoringError                    a scorer failed or hung; its trajectory fails, and gets no default score
    ├── ToolError                       a tool broke or hung; not raised for mistakes of the policy in a call
    └── SandboxError                    programs cannot be contained here, or a sandbox failed; nothing runs without one

A message names the error, its place, and a remedy. All exceptions are picklable (plain ``args``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "ArchiveError",
    "CheckpointError",
    "ConfigError",
    "Conflict",
    "ConstraintError",
    "DataError",
    "DeadlineError",
    "DiskFull",
    "Fenced",
    "Flaw",
    "Forbidden",
    "FrameError",
    "Gone",
    "Invalid",
    "NoRoom",
    "NotFound",
    "OutOfReach",
    "PenstockError",
    "ProtocolError",
    "QuotaUsed",
    "RankLost",
    "RateLimited",
    "Refused",
    "RetryLater",
    "SandboxError",
    "ScoringError",
    "StreamFull",
    "TooLarge",
    "ToolError",
    "Unauthenticated",
    "Unavailable",
    "UnreadableWeights",
    "Unsupported",
    "WeightsError",
    "class_named",
]


class PenstockError(Exception):
    """Base class of all exceptions of Penstock."""


class ConfigError(PenstockError, ValueError):
    """A job file, a flag or an environment variable is wrong."""


class ConstraintError(ConfigError):
    """A request prescribes a form that no answer can have: the schema of the form is invalid, or cannot be
    satisfied."""


class DataError(PenstockError, ValueError):
    """A data set cannot be used; the message names the file and the line."""


class ProtocolError(PenstockError, ValueError):
    """A message breaks the wire contract."""


class FrameError(ProtocolError):
    """A tensor frame is malformed: wrong magic, out-of-bounds blob, unknown dtype."""


class DeadlineError(PenstockError, TimeoutError):
    """A wait timed out; the message names the awaited event."""


class Unavailable(PenstockError, ConnectionError):  # noqa: N818
    """The bus or a service does not answer."""


class StreamFull(Unavailable):
    """A stream rejected a message because its byte budget is used up (back-pressure)."""


class DiskFull(Unavailable):
    """The bus could not store a message because its disk is full; the byte budget of the stream is not used up."""


class RankLost(Unavailable):
    """A rank of the trainer died or does not answer; the collective operation cannot continue."""


class Fenced(PenstockError):  # noqa: N818
    """Another writer has taken over with a higher epoch; the writer that gets this exception must stop writing."""


class Conflict(PenstockError):  # noqa: N818
    """The current state does not allow the request."""


class NotFound(PenstockError, KeyError):  # noqa: N818
    """The requested job, message, checkpoint or other object does not exist."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


@dataclass(frozen=True, slots=True)
class Flaw:
    """One invalid part of a request: its place (``pointer``), and what is wrong with it (``detail``)."""

    pointer: str = field(
        metadata={"description": "JSON pointer into the body, or the parameter as /query/NAME, /path/NAME"}
    )
    detail: str


class Refused(PenstockError):  # noqa: N818
    """A request is refused. ``code`` is the reason for programs, ``detail`` explains it to people, and ``flaws`` lists
    the invalid parts of the request."""

    def __init__(self, code: str, detail: str, flaws: Sequence[Flaw] = ()) -> None:
        super().__init__(code, detail, tuple(flaws))
        self.code, self.detail, self.flaws = code, detail, tuple(flaws)

    def __str__(self) -> str:
        return self.detail


class Invalid(Refused):
    """The request itself is invalid, so sending it again does not help."""


class Unauthenticated(Refused):
    """The caller gives no credentials, or credentials that are not valid."""


class Forbidden(Refused):
    """The caller is authenticated, but lacks the permission for this request."""


class OutOfReach(Refused):
    """No object of this name is available to the caller: it belongs to another caller, or is not offered."""


class Gone(Refused):
    """The object of the request ended or was deleted; it takes no requests any more."""


class TooLarge(Refused):
    """The request is larger than can be stored."""


class NoRoom(Refused):
    """There is no storage space for the request. It can succeed once space is freed."""


class QuotaUsed(NoRoom):
    """The caller has used up its own share of the storage space, even if there is space for other callers. A retry does
    not help."""


class RetryLater(Refused):
    """The request cannot be served now; the sender may repeat it after ``retry_after_s`` seconds."""

    def __init__(self, code: str, detail: str, flaws: Sequence[Flaw] = (), *, retry_after_s: float = 1.0) -> None:
        super().__init__(code, detail, flaws)
        self.retry_after_s = retry_after_s


class RateLimited(RetryLater):
    """The sender sends more requests than the service can accept, and has to slow down."""


class Unsupported(PenstockError):  # noqa: N818
    """The simulator does not offer the requested operation."""


class WeightsError(PenstockError):
    """A weight transfer failed; the receiver keeps its old version."""


class UnreadableWeights(WeightsError):  # noqa: N818
    """A receiver supports none of the transports that offer a version, so publishing the version again would not
    help."""


class CheckpointError(PenstockError):
    """A checkpoint is missing, partial, or belongs to another job or model."""


class ArchiveError(PenstockError):
    """A segment of an archived ledger is missing or was changed; the message names it."""


class ScoringError(PenstockError):
    """A scorer raised, hung or returned a value that is not a finite number."""


class ToolError(PenstockError):
    """A tool broke, hung, or cannot be opened. A wrong tool call by the policy does not raise this error."""


class SandboxError(PenstockError):
    """Programs cannot be contained on this machine, or a sandbox failed. Failures of the contained program do not raise
    this error."""


def class_named(name: str) -> type[PenstockError]:
    """Return the exception class for a name that another process sent, to raise that process's error here.

    An unknown name, or that of a ``Refused``, which needs more than a message, gives ``PenstockError``.
    """
    found = globals().get(name) if name in __all__ else None
    if isinstance(found, type) and issubclass(found, PenstockError) and not issubclass(found, Refused):
        return found
    return PenstockError
