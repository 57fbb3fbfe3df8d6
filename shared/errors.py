"""Every error that Penstock raises on purpose.

::

    PenstockError
    ├── ConfigError (ValueError)        the user's file, flag or environment is wrong
    │   └── ConstraintError             an answer cannot be made to have the form that a request asks for
    ├── DataError (ValueError)          a data set cannot be read; names the file and the line
    ├── ProtocolError (ValueError)      bytes from the wire break the contract; never guessed, dead-lettered
    │   └── FrameError                  a tensor frame is malformed
    ├── DeadlineError (TimeoutError)    a wait ran out; says what it waited for
    ├── Unavailable (ConnectionError)   a service or the bus does not answer
    │   ├── StreamFull                  the stream's byte budget is used up: back off and retry
    │   ├── DiskFull                    the disk under the bus has no room: it stores nothing until there is some
    │   └── RankLost                    another process of the same trainer died or hangs: all of them start over
    ├── Fenced                          somebody with a higher epoch took over: step down, write nothing
    ├── Conflict                        the state does not allow it (HTTP 409)
    ├── NotFound (KeyError)             no such job, message or checkpoint
    ├── WeightsError                    a weight transfer failed; the engine stays on its old version
    ├── CheckpointError                 a checkpoint is missing, partial or does not match
    ├── ArchiveError                    a segment of an archived ledger is missing or was changed
    ├── ScoringError                    a scorer failed or hung; the trajectory is failed, never scored by default
    ├── ToolError                       a tool broke or hung; says nothing about the call
    └── SandboxError                    programs cannot be contained here, or a sandbox failed; nothing runs without one

A message says what went wrong, where, and what to do. All are picklable (plain ``args``).
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
    "WeightsError",
]


class PenstockError(Exception):
    """Root of the tree."""


class ConfigError(PenstockError, ValueError):
    """A job file, a flag or an environment variable is wrong."""


class ConstraintError(ConfigError):
    """No answer can have the form that a request asks for: its schema is wrong, or nobody can keep to it."""


class DataError(PenstockError, ValueError):
    """A data set cannot be used; the message names the file and the line."""


class ProtocolError(PenstockError, ValueError):
    """A message breaks the wire contract."""


class FrameError(ProtocolError):
    """A tensor frame is malformed: wrong magic, out-of-bounds blob, unknown dtype."""


class DeadlineError(PenstockError, TimeoutError):
    """A wait ran out of time; the message says what it waited for."""


class Unavailable(PenstockError, ConnectionError):  # noqa: N818
    """The bus or a service does not answer."""


class StreamFull(Unavailable):
    """A stream refused a message because its byte budget is used up (back-pressure)."""


class DiskFull(Unavailable):
    """The bus could not store a message because its disk, not the stream, has no room."""


class RankLost(Unavailable):
    """A rank of the trainer died or does not answer; what the ranks did together cannot go on."""


class Fenced(PenstockError):  # noqa: N818
    """A writer with a higher epoch exists; this one must stop writing."""


class Conflict(PenstockError):  # noqa: N818
    """The request is not legal in the present state."""


class NotFound(PenstockError, KeyError):  # noqa: N818
    """No such thing."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class WeightsError(PenstockError):
    """A weight transfer failed; the receiver keeps its old version."""


class CheckpointError(PenstockError):
    """A checkpoint is missing, partial, or belongs to something else."""


class ArchiveError(PenstockError):
    """A segment of an archived ledger is missing or was changed; the message names it."""


class ScoringError(PenstockError):
    """A scorer raised, hung or returned something that is not a finite number."""


class ToolError(PenstockError):
    """A tool broke, hung, or cannot be opened; a mistake in a call is none."""


class SandboxError(PenstockError):
    """Nothing on this machine contains programs, or a sandbox failed; says nothing about the program."""
