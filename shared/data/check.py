"""Checks of a job's data that need no tokenizer, made at submission."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.shared.config.data import DataConfig, PromptConfig, Source, source_names
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import ROW_BYTES
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.data.files import place_of
from penstock.shared.data.prompts import check_messages
from penstock.shared.data.rows import Rows, check_rows, open_rows
from penstock.shared.data.scorer_needs import ScorerNeeds
from penstock.shared.data.template import Template
from penstock.shared.errors import DataError

__all__ = ["DataSummary", "SourceSummary", "check_data", "data_of"]

_ROWS_RENDERED = 64
_ROWS_MEASURED = 50_000
"""Maximum number of rows whose size is measured per source; of a larger source, every n-th row is measured."""
MAX_SUMMARIES = 64
SETTLED_S = 2.0
"""Smallest age of a file's last change (seconds) at which its modification time identifies its content: a later write
would change the time."""
_encoder = msgspec.msgpack.Encoder(enc_hook=str)


_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """Summary of an opened source: its name in the job, its number of rows, and its path or description (``what``)."""

    name: str
    rows: int
    what: str


@dataclass(frozen=True, slots=True)
class DataSummary:
    """Sizes of a job's data. ``notes`` describe rows that were left out and checks that were skipped."""

    train: tuple[SourceSummary, ...]
    eval: tuple[SourceSummary, ...]
    rows_per_epoch: int
    num_eval: int
    row_bytes: int
    """Bytes by which the largest measured row exceeds ROW_BYTES; 0 if none does. Stored groups grow by as much."""
    notes: tuple[str, ...]


_summaries_known: dict[str, DataSummary] = {}


def check_data(config: DataConfig, reward: RewardConfig | None = None) -> DataSummary:
    """Open every source, parse every row and render the first rows. This reads files: call it off the event loop.

    The summary of unchanged data is cached, because many jobs train on the same files.

    With ``reward`` the rows must also have what its scorers need. The curriculum function is code of the user and is
    not loaded here.

    Raises:
        DataError: a source cannot be used; the text names the file, the line and the field.
    """
    key = _key(config, reward)
    with _lock:
        known = _summaries_known.get(key) if key is not None else None
    if known is not None:
        return known
    found = _check(config, reward)
    if key is not None:
        with _lock:
            _summaries_known[key] = found
            while len(_summaries_known) > MAX_SUMMARIES:
                del _summaries_known[next(iter(_summaries_known))]
    return found


def data_of(config: AnyTraining) -> DataSummary:
    """Return the result of ``check_data`` for a training job. An embodied job, which trains in a simulator, has no
    rows; its held-out episodes are summarized as one source."""
    if not isinstance(config, EmbodiedJob):
        return check_data(config.data)
    episodes = config.evaluation.episodes
    held_out = (SourceSummary("episodes", episodes, config.held_out_simulator.task),) if episodes else ()
    return DataSummary(train=(), eval=held_out, rows_per_epoch=0, num_eval=episodes, row_bytes=0, notes=())


def _key(config: DataConfig, reward: RewardConfig | None) -> str | None:
    """Return the cache key of a summary: the configuration, and inode, size and times of each file. None: do not cache,
    because a source is not a regular file, or was changed less than SETTLED_S ago."""
    parts = [config.model_dump_json(), "" if reward is None else reward.model_dump_json()]
    for source in (*config.train, *config.eval):
        for path in (getattr(source, "path", None), getattr(source, "exclude_path", None)):
            if path is None:
                continue
            try:
                found = place_of(path).stat()
            except OSError:
                return None
            if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime < SETTLED_S:
                return None
            parts.append(f"{path}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}")
    return "\n".join(parts)


def _check(config: DataConfig, reward: RewardConfig | None) -> DataSummary:
    use = _renderer(config.prompt, reward)
    train, eval_ = _open(config.train, use), _open(config.eval, use)
    return DataSummary(
        train=_summaries(config.train, train),
        eval=_summaries(config.eval, eval_),
        rows_per_epoch=sum(len(rows) for rows in train),
        num_eval=sum(len(rows) for rows in eval_),
        row_bytes=max(0, max(map(_largest_row, (*train, *eval_)), default=0) - ROW_BYTES),
        notes=tuple(note for rows in (*train, *eval_) for note in rows.notes),
    )


def _open(sources: Sequence[Source], use: Callable[[dict[str, Any], str], object]) -> list[Rows]:
    opened = [open_rows(source) for source in sources]
    for rows in opened:
        check_rows(rows, use, first=_ROWS_RENDERED)
    return opened


def _summaries(sources: Sequence[Source], opened: Sequence[Rows]) -> tuple[SourceSummary, ...]:
    names = source_names(sources)
    return tuple(SourceSummary(name, len(rows), rows.name) for name, rows in zip(names, opened, strict=True))


def _largest_row(rows: Rows) -> int:
    every = -(-len(rows) // _ROWS_MEASURED) or 1
    return max((len(_encoder.encode(rows[index])) for index in range(0, len(rows), every)), default=0)


def _renderer(config: PromptConfig, reward: RewardConfig | None) -> Callable[[dict[str, Any], str], object]:
    template = Template(config.template, "data.prompt.template")
    answer = None if config.answer is None else Template(config.answer, "data.prompt.answer")
    needs = None if reward is None else ScorerNeeds(reward, has_answer=answer is not None)

    def use(row: dict[str, Any], place: str) -> None:
        if config.messages is not None:
            check_messages(row, config.messages, place)
        elif not template.render(row, place) and config.system is None:
            raise DataError(f"{place}: the prompt is empty")
        if answer is not None:
            answer.render(row, place)
        if needs is not None:
            needs(row, place)

    return use
