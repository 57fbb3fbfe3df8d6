"""All exceptions that Penstock raises deliberately.

::

    PenstockError
    ├── ConfigError (ValueError)        the user's file, flag or environment is wrong
    │   └── ConstraintError             an answer cannot be made to have the form that a request prescribes
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
    ├── Unsupported                     this simulator does not offer the operation
    ├── WeightsError                    a weight transfer failed; the engine keeps its old version
    │   └── UnreadableWeights           this process can use no transport of a version, whoever publishes it again
    ├── CheckpointError                 a checkpoint is missing, partial, or of another job or model
    ├── ArchiveError                    a segment of an archived ledger is missing or was changed
    ├── ScoringError                    a scorer failed or hung; its trajectory fails, and gets no default score
    ├── ToolError                       a tool broke or hung; not raised for mistakes of the policy in a call
    └── SandboxError                    programs cannot be contained here, or a sandbox failed; nothing runs without one

A message names the error, its place, and a remedy. All exceptions are picklable (plain ``args``).
"""

from __future__ import annotations

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
    "FrameError",
    "NotFound",
    "PenstockError",
    "ProtocolError",
    "RankLost",
    "SandboxError",
    "ScoringError",
    "StreamFull",
    "ToolError",
    "Unavailable",
    "UnreadableWeights",
    "Unsupported",
    "WeightsError",
]


class PenstockError(Exception):
    """Base class of all exceptions of Penstock."""


class ConfigError(PenstockError, ValueError):
    """A job file, a flag or an environment variable is wrong."""


class ConstraintError(ConfigError):
    """No answer can have the form that a request prescribes: its schema is wrong, or cannot be satisfied."""


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


class Unsupported(PenstockError):  # noqa: N818
    """The simulator does not offer the requested operation."""


class WeightsError(PenstockError):
    """A weight transfer failed; the receiver keeps its old version."""


class UnreadableWeights(WeightsError):  # noqa: N818
    """A receiver can use no transport by which a version is offered; publishing it again would not help."""


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
