"""Start and end of each stage of a policy update, from the times in the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.shared.protocol.events import (
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    LineageForked,
)
from penstock.shared.protocol.ids import Draw

__all__ = ["timeline"]


def timeline(events: Iterable[Event], *, step: int | None, limit: int = 20) -> list[dict[str, Any]]:
    """Return the spans of update ``step``, or of the newest ``limit`` ones, oldest first: for a Gantt chart.

    Each has ``step``, ``stage``, ``start`` and ``end`` (Unix seconds by the leader's clock). Stages: ``generate`` (from
    the first draw until the batch was sealed), ``wait`` (sealed, while the trainer worked on the batch before),
    ``train``, ``checkpoint`` (of the state after it, until it was durable).
    """
    asked: dict[Draw, float] = {}
    sealed: dict[int, BatchSealed] = {}
    spans: dict[int, list[dict[str, Any]]] = {}
    free = 0.0
    for event in events:
        match event:
            case Drawn():
                asked |= {Draw(ordinal): event.time for ordinal in range(event.start, event.stop)}
            case Dropped() if event.redraw:
                asked |= {draw.again(): event.time for draw in event.draws}
            case BatchRefused() if event.redraw:
                asked |= {draw.again(): event.time for draw in event.bad}
            case LineageForked():
                free = event.time
            case BatchSealed():
                sealed[event.number] = event
            case BatchTrained():
                batch = sealed.pop(event.number)
                begun = min((asked.pop(g.draw, batch.time) for g in batch.groups), default=batch.time)
                start = max(batch.time, free)
                spans[event.number] = [
                    _span(event.number, "generate", begun, batch.time),
                    *([_span(event.number, "wait", batch.time, start)] if start > batch.time else []),
                    _span(event.number, "train", start, event.time),
                ]
                free = event.time
            case Checkpointed() if event.number in spans:
                end_of_training = spans[event.number][-1]["end"]
                spans[event.number].append(_span(event.number, "checkpoint", end_of_training, event.time))
            case _:
                pass
    chosen = [step] if step is not None else sorted(spans)[-limit:]
    return [span for number in chosen for span in spans.get(number, [])]


def _span(step: int, stage: str, start: float, end: float) -> dict[str, Any]:
    return {"step": step, "stage": stage, "start": start, "end": end}
