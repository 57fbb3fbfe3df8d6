"""Losses that a group can be trained with."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["OBJECTIVES", "Objective"]

Objective = Literal["policy", "supervised", "preference", "replay"]
"""policy: the policy gradient, within the lag bound. supervised: imitation. preference: two answers to one prompt,
the better one first. These two need no sampling policy and have no lag. replay: transitions that a replay buffer
stores once; without lag, too."""

OBJECTIVES: frozenset[str] = frozenset(get_args(Objective))
