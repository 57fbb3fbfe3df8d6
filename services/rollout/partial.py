"""Saves completions in progress to the stream PARTIAL: if their worker dies or drains, another worker continues them.

A worker saves the completions of groups that run long, and when it leaves also the completions of all other groups. A
worker looks for saved completions only if its ticket was delivered before, so short groups cost nothing. A record that
no worker reads expires: it is harmless, because the draw of a published group is never requested again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain

from penstock.services.rollout.commit_rule import Attempt, CommitRule
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.policy import PolicyFollower
from penstock.services.rollout.tickets import HandedOver
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.errors import PenstockError, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.generation import Sample
from penstock.shared.protocol.partial import decode_partial, encode_partial
from penstock.shared.protocol.trajectory import Group
from penstock.shared.protocol.weights import short_digest
from penstock.shared.runtime import metrics
from penstock.shared.runtime.tasks import together
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["GRACE_S", "SAVE_S", "PartialGroups"]

logger = logging.getLogger(__name__)

GRACE_S = 4.0
"""Seconds that a leaving worker gives its groups to end; a whole drain must fit into the 10 s of `docker stop`."""
SAVE_S = 3.0
"""Seconds for which a leaving worker tries to save the groups that did not end."""
RETRY_S = 0.5
"""Pause between two attempts to save a group, and shortest time limit of one publish, in seconds."""
PUBLISH_S = 3.0
"""Longest time limit of one publish, in seconds."""
AT_ONCE = 256
"""Maximum number of completions in one atomic publish."""
CONTINUED = metrics.counter("rollout_continued_tokens", "Tokens of other workers' completions that went on here.")


class PartialGroups:
    """Saves one job's training groups in progress on this worker, and continues saved groups of other workers.

    Args:
        rule: runs the generation of the groups.
        policy: knows the policy version that this worker serves.
    """

    def __init__(
        self, bus: Bus, job: str, config: JobConfig, *, engine: Engine, rule: CommitRule, policy: PolicyFollower
    ) -> None:
        self._bus, self._job, self._config = bus, job, config
        self._engine, self._rule, self._policy = engine, rule, policy
        self._of: dict[Attempt, tuple[str, str]] = {}
        """Ticket key and recipe (see ``GroupMaker.recipe``) of each group in progress."""
        self._saving = asyncio.Lock()
        self._leave_by = math.inf
        """Monotonic time (seconds) until which a leaving worker tries to save."""
        own = set(config.sampling.stop_token_ids)
        self._stop_ids = own if config.sampling.ignore_eos else own.union(engine.stop_ids)
        self.continued_tokens = 0
        """Number of tokens taken over from other workers since the start."""

    @staticmethod
    def is_possible(config: TextJob, engine: Engine) -> bool:
        """Return True if workers can continue unfinished groups of other workers in this job. Only training groups of
        plain completions can be continued.

        Episodes cannot be continued, because their tools may have acted already; nor can completions with recorded
        experts, because only the worker that generated a prefix has its experts.
        """
        if not isinstance(config, JobConfig) or not config.rollout.checkpoint_s:
            return False
        if config.environment is not None or config.model.replay_bytes_per_token:
            return False
        if not hasattr(engine, "written"):  # a class of the user that does not extend EngineAdapter
            logger.warning("the engine of '%s' has no method 'written': unfinished groups begin again", config.name)
            return False
        return True

    async def make(
        self, key: str, recipe: str, generate: Callable[[Attempt], Awaitable[Group]], *, repeated: bool, oldest: int
    ) -> Group:
        """Generate a group with ``CommitRule.make``; continue saved completions of another worker if there are any.

        Args:
            key: key of the ticket. recipe: see ``GroupMaker.recipe``.
            repeated: True if another worker may have begun the ticket.
            oldest: oldest version that the ticket accepts.

        Raises:
            HandedOver: this worker leaves; the tokens of the group are saved if the stream accepts them.
        """
        found = await self._read(key, recipe) if repeated else {}

        async def begin(attempt: Attempt) -> Group:
            attempt.begun = {place: sample for place, sample in found.items() if self._accepts(sample, oldest)}
            self._count(key, attempt.begun)
            self._of[attempt] = key, recipe
            try:
                group = await generate(attempt)
                if attempt.handed_over and any(sample.finish == "abort" for sample in attempt.ended.values()):
                    raise HandedOver(await self._save_last(attempt))
            finally:
                del self._of[attempt]
            return group

        return await self._rule.make(key, begin)

    async def run(self) -> None:
        """Save the groups that have been running for ``rollout.checkpoint_s``, again and again, until cancelled."""
        every_s = self._config.rollout.checkpoint_s
        while True:
            await asyncio.sleep(every_s / 4)
            now = time.monotonic()
            due = [attempt for attempt in self._of if attempt.requests and now - attempt.saved_at >= every_s]
            if due:
                await self.save(due)

    async def hand_over(self, save_s: float = SAVE_S) -> None:
        """End the groups in progress at a token boundary: ``make`` saves them, within ``save_s`` seconds, and raises
        HandedOver."""
        self._rule.leave()
        self._leave_by = time.monotonic() + save_s
        leaving = [attempt for attempt in self._of if attempt.requests]
        for attempt in leaving:
            attempt.handed_over = True
        if leaving:
            await self._engine.abort(set(chain.from_iterable(attempt.requests for attempt in leaving)))

    async def save(self, attempts: Sequence[Attempt], *, whole: bool = False) -> bool:
        """Write the completions of these groups to the stream; log a warning and return False if that fails.

        Args:
            whole: True to write also the completions that were already saved after they had ended.
        """
        async with self._saving:  # otherwise an older save might replace a newer one
            try:
                running = set(chain.from_iterable(attempt.requests for attempt in attempts))
                written = await self._engine.written(running) if running else {}
                left = [attempt for attempt in attempts if attempt in self._of]  # others were published meanwhile
                ended = [(attempt, set(attempt.ended)) for attempt in left]
                messages = [one for attempt in left for one in self._messages(attempt, written, whole=whole)]
                for start in range(0, len(messages), AT_ONCE):
                    left_s = max(RETRY_S, self._leave_by - time.monotonic())
                    await self._bus.publish_many(messages[start : start + AT_ONCE], deadline_s=min(PUBLISH_S, left_s))
            except PenstockError as error:
                logger.warning("completions in progress of %s are not saved: %s", self._job, error)
                return False
            finally:
                for attempt in attempts:
                    attempt.saved_at = time.monotonic()
        for attempt, places in ended:
            attempt.saved |= places
        return True

    async def _save_last(self, attempt: Attempt) -> str:
        """Save a group that this worker leaves unfinished; return a log text that states what becomes of its tokens."""
        num_tokens = sum(len(sample.token_ids) for sample in attempt.ended.values())
        while not await self.save([attempt], whole=True):
            if time.monotonic() + RETRY_S >= self._leave_by:
                return f"its {num_tokens} tokens are lost, except those that were saved before"
            await asyncio.sleep(RETRY_S)
        return f"another worker goes on with its {num_tokens} tokens"

    def _messages(self, attempt: Attempt, written: Mapping[str, Sample], *, whole: bool) -> list[Outgoing]:
        key, recipe = self._of[attempt]
        now = {place: sample for place, sample in attempt.ended.items() if whole or place not in attempt.saved}
        now |= {place: written[name] for name, place in attempt.requests.items() if name in written}
        messages = []
        for place, sample in now.items():
            data = encode_partial(sample, recipe)
            if len(data) > MAX_INLINE_BYTES:
                logger.warning("a completion of ticket %s is not saved: %d tokens", key, len(sample.token_ids))
            elif sample.token_ids:
                messages.append(Outgoing(subjects.partial(self._job, key, place), data))
        return messages

    async def _read(self, key: str, recipe: str) -> dict[int, Sample]:
        """Return the saved completions of a ticket by their index in the group. Leave out completions that cannot be
        read, or that were sampled with other requests (``recipe`` is a digest of the requests)."""
        names = [subjects.partial(self._job, key, place) for place in range(self._config.completions_per_group)]
        try:
            messages = await together(self._bus.last(subjects.PARTIAL, name) for name in names)
        except Unavailable as error:
            logger.warning("ticket %s begins anew: %s", key, error)
            return {}
        found = {}
        for place, message in enumerate(messages):
            if message is None:
                continue
            try:
                found[place] = decode_partial(message.data, recipe)
            except ProtocolError as error:
                logger.warning("completion %d of ticket %s begins anew: %s", place, key, error)
        return found

    def _accepts(self, sample: Sample, oldest: int) -> bool:
        """Return True if this worker may use a saved completion of another worker.

        With ``rollout.on_update: restart`` all its tokens must come from the served weights. Otherwise no version
        may be older than ``oldest``, or be more than ``train.max_lag`` behind the served one, and tokens of the served
        version must come from the served weights. If the completion was aborted, another token must be possible.
        """
        if sample.finish == "abort" and self._is_whole(sample.token_ids):
            return False
        spans, serving = {(span.version, span.weights) for span in sample.spans}, self._policy.version
        served = serving, short_digest(self._policy.digest)
        if self._config.rollout.on_update == "restart":
            return spans == {served}
        if any(version == serving for version, _ in spans - {served}):  # other weights under the same number
            return False
        return min(spans)[0] >= max(oldest, serving - self._config.train.max_lag)

    def _is_whole(self, token_ids: Sequence[int]) -> bool:
        """Return True if no token can follow ``token_ids``.

        A worker may have saved such a completion as aborted, before its engine reported the end.
        """
        num, limits = len(token_ids), self._config.sampling
        is_stopped = num >= limits.min_new_tokens and token_ids[-1] in self._stop_ids
        return is_stopped or num >= limits.max_new_tokens

    def _count(self, key: str, begun: Mapping[int, Sample]) -> None:
        if not begun:
            return
        num_tokens = sum(len(sample.token_ids) for sample in begun.values())
        self.continued_tokens += num_tokens
        CONTINUED.inc(num_tokens)
        logger.info("ticket %s goes on with %d tokens of %d completions", key, num_tokens, len(begun))
