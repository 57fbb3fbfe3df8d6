"""Tracker for TensorBoard: writes event files without torch or tensorflow."""

from __future__ import annotations

import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.services.coordinator.trackers.base import Run
from penstock.shared.config.tracking import TensorBoardTracker

__all__ = ["open_tensorboard"]

FLUSH_S = 5


class _TensorBoard:
    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer: Any = EventFileWriter(str(directory), flush_secs=FLUSH_S)
        # A session start at step 0 makes TensorBoard discard the rows of earlier leaders, which are written again.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=clock.time(), step=0, session_log=start))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See ``Tracker.write``."""
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summaries.Summary(value=scalars)
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=summary))

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._writer.close()


def open_tensorboard(config: TensorBoardTracker, run: Run) -> _TensorBoard:
    """Open event files in the directory of the run."""
    return _TensorBoard(run.directory)
