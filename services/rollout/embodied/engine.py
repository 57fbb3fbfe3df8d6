"""Engine of one worker's policy network: decides on actions, and swaps versions between two decisions."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.rollout.engines import UpdateMode
from penstock.services.rollout.engines.updates import ServedWeights, WeightUpdate
from penstock.shared.errors import Conflict, Unavailable, WeightsError
from penstock.shared.models.episode_policy import EpisodePolicy
from penstock.shared.protocol.generation import Caps, WeightInfo
from penstock.shared.protocol.weights import short_digest

__all__ = ["Decided", "PolicyEngine"]

INLINE_PRODUCTS = 4 << 20
"""Maximum number of multiply-adds that the event loop computes itself, without a thread (about a millisecond)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """N decisions of one policy version; ``weights`` is the short digest of its weights."""

    actions_NCA: NDArray[Any]
    """Actions as the policy sampled them."""
    logprobs_NCA: NDArray[np.float32]
    executed: NDArray[Any]
    """Actions [N, C, ...] for the simulator: clipped, scaled, in its dtype."""
    version: int
    weights: str


class PolicyEngine:
    """Owns the policy. Copies each new version, so that decisions never read shared memory that others write."""

    caps = Caps(transports=("shm", "tcp", "disk"), pause_modes=(), native_spans=True, sleep=False)

    def __init__(self, policy: EpisodePolicy, *, device: str = "cpu") -> None:
        self._policy, self._device = policy.to(device).eval(), device
        self.noise, self.noise_shape = policy.noise, policy.noise_shape
        self.action_dtype = "float32" if policy.noise == "normal" else "int64"
        """Dtype of actions: float32 with normal noise; int64 if uniform noise selects a discrete value."""
        self._num_products = policy.num_products
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._lock = asyncio.Lock()
        """Held while the policy decides or loads a version."""
        self._served: ServedWeights[WeightUpdate] = ServedWeights()
        self._closed = False
        self.num_decisions = 0
        self.seconds = 0.0
        """Total time spent on decisions (seconds)."""

    async def decide(self, observations: Mapping[str, NDArray[Any]], noise_NCA: NDArray[np.float32] | None) -> Decided:
        """Return decisions for N observations: sampled with ``noise_NCA``, or the mean actions if ``noise_NCA`` is
        None.

        Raises:
            Unavailable: the engine is closed.
        """
        async with self._lock:
            if self._closed:
                raise Unavailable("the policy's engine is closed")
            num_rows = len(next(iter(observations.values())))
            if num_rows * self._num_products <= INLINE_PRODUCTS:
                return self._decide(observations, noise_NCA)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._decide, observations, noise_NCA)

    async def copy(self) -> PolicyEngine:
        """Return a new engine with a copy of the current policy. The copy is never updated, and needs no ``close``."""
        async with self._lock:
            other = PolicyEngine(copy.deepcopy(self._policy), device=self._device)
            other._served.version, other._served.digest = self._served.version, self._served.digest
            return other

    @property
    def version(self) -> int:
        """Version of the served policy; -1 before the first version."""
        return self._served.version

    async def close(self) -> None:
        """Stop the engine. Safe to repeat."""
        self._closed = True
        self._thread.shutdown(wait=False)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(
        self,
        *,
        version: int,
        digest: str,
        mode: UpdateMode,
        guard: Callable[[], bool] | None = None,
        base: bool = False,
    ) -> None:
        """Open an update; see ``Updatable.begin_update``. Parameters and buffers are updated together."""
        self._served.check_none()
        if base or mode != "swap":
            raise Conflict(f"a policy network has no base and is swapped; asked for mode '{mode}'")
        parameters = self._policy.state_dict(keep_vars=True)
        self._served.begin(WeightUpdate(parameters, version, digest, mode, guard))

    async def load_chunk(self, tensors: Mapping[str, Tensor]) -> None:
        """Stage copies of tensors; see ``Updatable.load_chunk``."""
        update = self._served.current()
        try:
            copied = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            update.stage(copied)
        except WeightsError:
            self._served.give_up(dirty=False)
            raise

    async def commit_update(self) -> float:
        """Swap in the staged weights between two decisions; see ``Updatable.commit_update``."""
        update = self._served.current()
        async with self._lock:
            start = time.perf_counter()
            try:
                update.commit()
                self._served.adopt()
            finally:
                self._served.give_up(dirty=False)
            return time.perf_counter() - start

    async def abort_update(self) -> None:
        """Discard the open update. Safe to repeat."""
        self._served.give_up(dirty=False)

    async def weight_info(self) -> WeightInfo:
        """Return the version that is served."""
        return self._served.info()

    def _decide(self, observations: Mapping[str, NDArray[Any]], noise_NCA: NDArray[np.float32] | None) -> Decided:
        start = time.perf_counter()
        read = {name: observations[name] for name in self._policy.observed}
        seen = {name: torch.from_numpy(array).to(self._device) for name, array in read.items()}
        noise = None if noise_NCA is None else torch.from_numpy(noise_NCA).to(self._device)
        decision = self._policy.act(seen, noise)
        decided = Decided(
            actions_NCA=decision.actions_NCA.cpu().numpy(),
            logprobs_NCA=decision.logprobs_NCA.cpu().numpy(),
            executed=self._policy.to_environment(decision.actions_NCA),
            version=self._served.version,
            weights=short_digest(self._served.digest),
        )
        self.num_decisions += len(decided.actions_NCA)
        self.seconds += time.perf_counter() - start
        return decided
