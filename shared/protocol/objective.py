"""Losses that a group can be trained with."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["OBJECTIVES", "Objective"]

Objective = Literal["policy", "supervised", "preference", "replay"]
"""policy: the policy gradient, within the lag bound. supervised: imitation. preference: two answers to one prompt,
the better one first. Supervised and preference losses need no sampling policy, so the lag bound does not apply.
replay: transitions that a replay buffer stores once; the lag bound does not apply either."""

OBJECTIVES: frozenset[str] = frozenset(get_args(Objective))
