"""Which loss a group is trained with."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["OBJECTIVES", "Objective"]

Objective = Literal["policy", "supervised", "preference", "replay"]
"""policy: the policy gradient, within the lag bound. supervised: to be imitated. preference: two answers to one prompt,
the better one first. These two need no policy that sampled the tokens, and know no lag. replay: transitions that a
replay buffer takes in once; they know no lag either."""

OBJECTIVES: frozenset[str] = frozenset(get_args(Objective))
