"""One rank's part in training one job. All ranks make the same calls in the same order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.services.trainer.backends.base import LearnerState
from penstock.services.trainer.batch.inputs import BatchInputs, Untrainable, decoder_of, fetch_shard
from penstock.services.trainer.checkpoint.state import help_save, load_checkpoint, save_checkpoint, verify_share
from penstock.services.trainer.checkpoint.store import remove_leftovers
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.learners.job_learner import JobLearner, open_learner
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.heartbeats import Threads
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard, owners
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.data.prompts import PromptSource
from penstock.shared.errors import CheckpointError, ConfigError, DataError, PenstockError
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.ids import Draw, derive_seed
from penstock.shared.protocol.messages import BatchManifest
from penstock.shared.transport.bus import Bus

__all__ = ["Replica"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Replica:
    """Holds this rank's learner, fetches its groups, and votes with the other ranks.

    Args:
        world: all ranks of the trainer; None: this process trains the job alone.
        threads: compute and disk threads of this process.
    """

    def __init__(
        self,
        bus: Bus,
        job: str,
        config: AnyTraining,
        *,
        world: World | None,
        threads: Threads,
        checkpoints: Path,
    ) -> None:
        self._bus, self.job, self.config = bus, job, config
        self._world, self._threads, self._root = world, threads, checkpoints
        self._all_ranks: Collective = Alone() if world is None else world.everybody
        self._votes: Collective = Alone() if world is None else world.votes
        self._collective: Collective = Alone()
        self._learner: JobLearner | None = None
        self._snapshot: LearnerState | None = None

    @property
    def learner(self) -> JobLearner:
        """The learner with the models of the job. Available after ``open``."""
        assert self._learner is not None, "not opened"
        return self._learner

    async def open(self, simulator: EnvSpec | None = None) -> None:
        """Build the learner with its initial weights; see ``open_learner``. Raises ConfigError."""

        def build() -> JobLearner:
            torch.set_num_threads(self.config.placement.trainer_threads)  # set per thread: OpenMP counts by thread
            if self._world is not None:
                self._collective = self._world.data_parallel(self.config.backend.model_parallel)
            return open_learner(self.config, self._collective, simulator=simulator)

        self._learner = None  # free its memory first
        self._learner = await self.together("the model to be built", build)

    async def warm_start(self, on_step: Callable[[int, float], None]) -> None:
        """Train on reference answers or demonstrations. Raises DataError, or ConfigError if they do not fit the job."""
        config, learner = self.config, self.learner
        if isinstance(learner, EmbodiedLearner):
            await self.together("the warm start", partial(learner.warm_start, on_step))
            return
        assert isinstance(config, JobConfig), "no other job has reference answers"
        assert isinstance(learner, Learner), "open_learner chooses by the job"
        warm = config.warm_start

        def work() -> None:
            source = PromptSource(
                config.warm_start_data, build_tokenizer(config.model), config.seed, demonstration=warm.demonstration
            )
            seed = derive_seed(config.seed, "warm_start")
            learner.warm_start(source.warm_start_batches(warm.batch_size, warm.steps, seed), on_step)

        await self.together("the warm start", work)

    async def load(self, path: Path) -> None:
        """Load a checkpoint written by any backend with any number of ranks. Raises CheckpointError."""
        everybody = self._all_ranks
        verify = partial(verify_share, path, rank=everybody.rank, ranks=everybody.size)
        await self.together(f"checkpoint {path} to be verified", verify, meets=False)
        into = None if self._world is None else await self._threads.compute(self.learner.state)
        read = partial(load_checkpoint, path, into=into, verified=True)
        checkpoint = await self.together(f"checkpoint {path} to be read", read)
        await self.together(f"checkpoint {path} to be loaded", partial(self.learner.load_state, checkpoint.state))

    def inputs(self, last_trained: int) -> BatchInputs:
        """Return a prefetcher of the batches after batch ``last_trained``, which fetches only this rank's groups."""
        return BatchInputs(
            self._bus, self.job, self.positions, max_lag=self.config.train.max_lag, decode=decoder_of(self.config),
            last_trained=last_trained,
        )  # fmt: skip

    def positions(self, manifest: BatchManifest) -> list[int]:
        """Return the positions in ``manifest`` of the groups that this rank trains.

        These are all groups for an embodied job, where the ranks divide each optimizer step instead.
        """
        if isinstance(self.config, EmbodiedJob):
            return list(range(len(manifest.groups)))
        tokens = [group.tokens for group in manifest.groups]
        objectives = [group.objective for group in manifest.groups]
        owner = owners(tokens, objectives, minibatches=self.config.train.minibatches, ranks=self._collective.size)
        return [int(position) for position in np.flatnonzero(owner == self._collective.rank)]

    async def fetch(self, manifest: BatchManifest, inputs: BatchInputs | None) -> BatchShard[Any]:
        """Return this rank's groups of a batch, after all ranks have confirmed in a vote that they have their groups.

        Raises:
            Untrainable: groups of any rank cannot be trained; names all bad draws, on every rank.
        """
        shard, bad, reason = None, [], ""
        try:
            if inputs is not None:
                shard = await inputs.shard(manifest)
            else:
                shard = await fetch_shard(
                    self._bus, manifest, self.positions(manifest), max_lag=self.config.train.max_lag,
                    decode=decoder_of(self.config),
                )  # fmt: skip
        except Untrainable as error:
            bad, reason = error.bad, error.reason
        vote = partial(self._vote, manifest, bad, reason)
        await self._threads.compute(vote)
        assert shard is not None
        return shard

    async def update(self, shard: BatchShard[Any], *, update_index: int) -> dict[str, float]:
        """Make one policy update and return its metrics. Raises ProtocolError or NonFiniteStep; see ``JobLearner``."""

        def work() -> dict[str, float]:
            with self._during(f"update {update_index}"):
                return self.learner.update(shard, update_index=update_index)

        metrics: dict[str, float] = await self._threads.compute(work)
        return metrics

    async def snapshot(self) -> None:
        """Copy the training state in memory, for ``restore``."""
        self.discard_snapshot()  # one copy at a time
        self._snapshot = await self._threads.compute(self.learner.state)

    async def restore(self) -> None:
        """Restore the training state from the copy that ``snapshot`` made, and free the copy."""
        assert self._snapshot is not None, "no snapshot was taken"
        await self._threads.compute(partial(self.learner.load_state, self._snapshot))
        self.discard_snapshot()

    def discard_snapshot(self) -> None:
        """Free the copy that ``snapshot`` made, if there is one."""
        self._snapshot = None

    async def gather_weights(self) -> None:
        """Take part in gathering the weights that rank 0 publishes."""
        await self._threads.compute(self._exhaust_weights)

    async def write(self, use: Callable[[JobLearner], T]) -> T:
        """Run ``use(learner)`` on rank 0 and return its result.

        ``use`` must read all weights, because the other ranks run every gather.
        """

        def work() -> T:
            with self._during("the weights to be gathered"):
                return use(self.learner)

        result: T = await self._threads.compute(work)
        return result

    async def copy(self) -> LearnerState:
        """Return a copy of the state, for ``save``."""
        state: LearnerState = await self._threads.compute(self.learner.state)
        return state

    async def remove_leftovers(self) -> None:
        """Delete unfinished files of earlier checkpoint writers, after this process's pending writes. Raises OSError.

        Only rank 0 calls this.
        """
        await self._threads.write(partial(remove_leftovers, self._root, self.job))

    async def save(self, state: LearnerState, number: int, token: str, meta: dict[str, object] | None) -> Path | None:
        """Write ``state`` in the disk thread, while training continues.

        Args:
            meta: metadata stored with the checkpoint; rank 0 only.

        Returns:
            Directory of the checkpoint on rank 0, else None.

        Raises:
            CheckpointError: a rank cannot write.
        """
        ranks = None if self._world is None or self._world.place.size == 1 else self._world.checkpoints
        if meta is None:
            assert ranks is not None, "a single rank is rank 0"
            await self._threads.write(partial(help_save, self._root, self.job, number, state, token=token, ranks=ranks))
            return None
        work = partial(save_checkpoint, self._root, self.job, number, state, meta, token=token, ranks=ranks)
        path: Path = await self._threads.write(work)
        return path

    def close(self) -> None:
        """Free the models."""
        self._learner = self._snapshot = None

    # -- votes -------------------------------------------------------------------------------------------------------

    async def together(self, what: str, work: Callable[[], T], *, meets: bool = True) -> T:
        """Run ``work`` on every rank in its compute thread, and return its result. All ranks raise if one rank fails.

        Args:
            what: description of the work for logs and errors.
            meets: whether ``work`` contains collectives. If it fails, the other ranks are notified at once, because
                they may wait for this rank in a collective.
        """

        def voted() -> T:
            result, error = None, None
            with self._during(what):
                try:
                    result = work()
                except (ConfigError, DataError, CheckpointError) as raised:
                    error = raised
                    logger.error("%s: %s", what, raised)
                    if meets:
                        self._announce(f"{what}: {raised}")
                self._raise_anywhere(error)
            return result  # type: ignore[return-value]

        done: T = await self._threads.compute(voted)
        return done

    def _announce(self, failure: str) -> None:
        if self._world is not None:
            self._world.failure = failure

    def _raise_anywhere(self, error: PenstockError | None) -> None:
        encoded = np.frombuffer(str(error or "").encode(), np.uint8)
        errors = [part["error"].tobytes().decode() for part in self._votes.gather({"error": encoded})]
        self._announce("")
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")

    def _vote(self, manifest: BatchManifest, bad: list[Draw], reason: str) -> None:
        with self._during(f"the vote on batch {manifest.number}"):
            votes = self._all_ranks.gather(
                {
                    "ordinal": np.array([draw.ordinal for draw in bad], np.int64),
                    "n": np.array([draw.n for draw in bad], np.int64),
                    "reason": np.frombuffer(reason.encode(), np.uint8),
                }
            )
        everywhere = {
            Draw(int(ordinal), int(n)): None
            for vote in votes
            for ordinal, n in zip(vote["ordinal"], vote["n"], strict=True)
        }
        if everywhere:
            reasons = {vote["reason"].tobytes().decode(): None for vote in votes if len(vote["reason"])}
            raise Untrainable(sorted(everywhere), "; ".join(reasons))

    def _exhaust_weights(self) -> None:
        with self._during("the weights to be gathered"):
            for _ in chain(self.learner.take_base(), self.learner.weights()):
                pass

    def _during(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._world is None else self._world.everybody.during(what)
