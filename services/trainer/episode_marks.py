"""How far each episode has been taken in, so that a step that is delivered twice is taken in once.

Shape legend: N = transitions, E = episodes that are not forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import CheckpointError, ProtocolError

__all__ = ["EpisodeMarks"]


class EpisodeMarks:
    """The next step of every episode. Steps of an episode come in order; any of them may come again.

    Episodes are numbered from 0 without gaps. One that is over is forgotten as soon as all before it are: what is
    remembered grows with the number of episodes that run at once, not with the length of the run.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._next: dict[int, int] = {}
        self._over: set[int] = set()

    def admit(
        self, episodes_N: NDArray[np.int64], steps_N: NDArray[np.int64], ends_N: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which steps are new, bool [N]; the others have been taken in before.

        Args:
            ends_N: the episode is over after this step.

        Raises:
            ProtocolError: a step is missing, or one comes after the end of its episode; nothing was taken in.
        """
        if len(steps_N) and (episodes_N.min() < 0 or steps_N.min() < 0):
            raise ProtocolError("episodes and steps are numbered from 0")
        fresh_N = np.zeros(len(steps_N), np.bool_)
        following: dict[int, int] = {}
        over: set[int] = set()
        rows = zip(episodes_N.tolist(), steps_N.tolist(), ends_N.tolist(), strict=True)
        for row, (episode, step, ends) in enumerate(rows):
            expected = following.get(episode, self._next.get(episode, 0))
            if episode < self._floor or step < expected:
                continue
            if episode in over or episode in self._over:
                raise ProtocolError(f"episode {episode}: step {step} comes after its end")
            if step > expected:
                raise ProtocolError(f"episode {episode}: step {step} comes before step {expected}; send that one first")
            fresh_N[row] = True
            following[episode] = step + 1
            if ends:
                over.add(episode)
        self._next |= following
        self._over |= over
        self._forget()
        return fresh_N

    def give_up(self, episodes: Iterable[int]) -> None:
        """No further step of these episodes will come."""
        self._over |= {episode for episode in episodes if episode >= self._floor}
        self._forget()

    def state(self) -> dict[str, Tensor]:
        """``floor``, the first episode not forgotten, int64 [1]; ``marks``: episode, next step, over, int64 [E, 3]."""
        known = sorted(self._next.keys() | self._over)
        rows = [[episode, self._next.get(episode, 0), int(episode in self._over)] for episode in known]
        return {"floor": torch.tensor([self._floor]), "marks": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: the tensors have other shapes.
        """
        if state["floor"].shape != (1,) or state["marks"].ndim != 2 or state["marks"].shape[1] != 3:
            raise CheckpointError("the marks of the replay buffer's episodes have other shapes than expected")
        rows = state["marks"].tolist()
        self._floor = int(state["floor"][0])
        self._next = {episode: step for episode, step, _ in rows if step}
        self._over = {episode for episode, _, over in rows if over}

    def _forget(self) -> None:
        while self._floor in self._over:
            self._over.remove(self._floor)
            self._next.pop(self._floor, None)
            self._floor += 1
