"""Pool of scorer processes for one job, which returns a reward or an error for each completion of a group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.services.reward.channel import Result, Score
from penstock.services.reward.process import ScorerProcess
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.errors import ScoringError
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.messages import ScoreReply, ScoreRequest, row_for
from penstock.shared.runtime import metrics

__all__ = ["Refusal", "ScorerPool"]

KILLED = metrics.counter("reward_processes_killed", "Scorer processes that hung, crashed or lost their group.")

_QUEUE_LIMIT_S = 60.0
_RETRY_OPEN_S = 5.0


class Refusal(NamedTuple):
    """Failure to open the scorers: error text, times of the first failure and of the last attempt (Unix seconds)."""

    error: str
    since: float
    tried: float


@dataclass(slots=True)
class _Sheet:
    """Scores of a group so far; a completion without scores counts as failed."""

    num_completions: int
    scores: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def reply(self, names: list[str], total: Callable[[list[float]], float]) -> ScoreReply:
        """Build the reply; ``total`` computes a reward from scores. A failed completion has 0 as reward and as each
        score."""
        nothing = [0.0] * len(names)
        rows = [self.scores.get(i, nothing) for i in range(self.num_completions)]
        return ScoreReply(
            rewards=[total(row) for row in rows],
            failed=[i not in self.scores for i in range(self.num_completions)],
            parts={name: [row[k] for row in rows] for k, name in enumerate(names)},
            errors=[f"completion {i}: {text}" for i, text in sorted(self.errors.items())],
        )


class ScorerPool:
    """Starts scorer processes once and reuses them; kills and replaces a process that hangs or dies."""

    def __init__(self, config: RewardConfig, num_processes: int) -> None:
        self._config = config
        self._names = config.component_names
        self._weights = [scorer.weight for scorer in config.scorers]
        self._slots: asyncio.LifoQueue[ScorerProcess | None] = asyncio.LifoQueue(num_processes)
        self._num_processes = num_processes
        self.refused: Refusal | None = None
        """The failure while the scorers cannot be opened, else None."""
        self.about: dict[str, str] = {}
        """Descriptions of the open scorers by name: digests, mechanisms, addresses."""
        for _ in range(num_processes):
            self._slots.put_nowait(None)

    async def start(self) -> None:
        """Start all processes, so that no group waits for imports. A failure is stored in ``refused``."""
        slots = [self._slots.get_nowait() for _ in range(self._slots.qsize())]
        async with asyncio.TaskGroup() as tasks:
            for slot in slots:
                tasks.create_task(self._warm(slot))

    async def close(self) -> None:
        """Kill all processes. Call it only while no group is being scored."""
        async with asyncio.TaskGroup() as tasks:
            while not self._slots.empty():
                process = self._slots.get_nowait()
                if process is not None:
                    tasks.create_task(process.kill())

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Score a group. Never raises for scorer failures: a failed completion has its error in the reply.

        A group goes to one process in one message. If the scorers are declared slow and none of them scores whole
        groups, each completion is a message of its own, and several processes score them at once.
        """
        sheet = _Sheet(len(request.completions))
        indices = list(range(sheet.num_completions))
        if self._config.slow and len(indices) > 1 and not self._config.whole_groups:
            await self._score_apart(request, indices, sheet)
        elif indices:
            await self._score_together(request, indices, sheet)
        return sheet.reply(self._names, self._total)

    async def _score_apart(self, request: ScoreRequest, indices: Sequence[int], sheet: _Sheet) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in indices:
                tasks.create_task(self._score_together(request, [index], sheet))

    async def _score_together(self, request: ScoreRequest, indices: Sequence[int], sheet: _Sheet) -> None:
        """Score completions in one process; if the process is lost, score the remaining ones one by one."""
        try:
            process = await self._take()
        except TimeoutError:
            text = f"no scorer process was free for {_QUEUE_LIMIT_S:g} s: start more reward services"
            sheet.errors.update(dict.fromkeys(indices, text))
            return
        left: Sequence[int] | None = indices
        try:
            process = process or await self._open()
            left = await self._run(process, request, indices, sheet)
        except ScoringError as error:  # the scorers cannot be opened
            sheet.errors.update(dict.fromkeys(indices, str(error)))
            return
        finally:
            healthy = left is None
            if process is not None and not healthy:
                KILLED.inc()
                await process.kill()
            self._slots.put_nowait(process if healthy else None)
        if left:
            await self._score_apart(request, left, sheet)

    async def _take(self) -> ScorerProcess | None:
        """Take a slot; return its process, or None if the slot has no live process. Raises TimeoutError if all slots
        stay busy."""
        if self._slots.empty():
            async with asyncio.timeout(_QUEUE_LIMIT_S):
                process = await self._slots.get()
        else:
            process = self._slots.get_nowait()
        return process if process is not None and process.alive else None

    async def _run(
        self, process: ScorerProcess, request: ScoreRequest, indices: Sequence[int], sheet: _Sheet
    ) -> Sequence[int] | None:
        """Score the completions ``indices`` and store the results in ``sheet``. If the process fails, return the
        indices left to score, else None."""
        limit_s = self._config.timeout_s
        completions = [request.completions[i] for i in indices]
        process.submit(Score(request.prompt, completions, request.answer, row_for(request.row, indices)))
        for position, index in enumerate(indices):
            try:
                result = await process.result(limit_s)
            except ScoringError as error:
                sheet.errors[index] = str(error)
                return indices[position + 1 :]
            if problem := self._problem(result):
                sheet.errors[index] = problem
            else:
                sheet.scores[index] = result.scores
        return None

    def _problem(self, result: Result) -> str:
        """Return why a result is unusable; '' if it is usable."""
        if result.error:
            return result.error
        if result.seconds > self._config.timeout_s:
            return f"scoring took {result.seconds:.1f} s, longer than reward.timeout_s ({self._config.timeout_s:g} s)"
        if not math.isfinite(self._total(result.scores)):
            return "the weighted sum of the scores is not finite"
        return ""

    def _total(self, scores: Sequence[float]) -> float:
        """Return the reward: the sum of weight times score."""
        return sum(weight * score for weight, score in zip(self._weights, scores, strict=True))

    async def _warm(self, process: ScorerProcess | None) -> None:
        try:
            process = process or await self._open()
        except ScoringError:
            process = None  # stored in `refused`, which answers every request
        finally:
            self._slots.put_nowait(process)

    async def _open(self) -> ScorerProcess:
        """Start a process. For a few seconds after a failure, raise the same error again without an attempt.

        Raises:
            ScoringError: the scorers cannot be opened.
        """
        now = bus_time()
        if self.refused is not None and now < self.refused.tried + _RETRY_OPEN_S:
            raise ScoringError(self.refused.error)
        try:
            process = await ScorerProcess.start(self._config)
        except ScoringError as error:
            since = self.refused.since if self.refused else now
            self.refused = Refusal(str(error), since, bus_time())
            raise
        self.refused = None
        self.about = process.about
        return process
