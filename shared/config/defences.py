"""Settings of `online.defences: standard`: bounds on what one sender, one user and one update can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["STANDARD", "Defences", "with_defences"]

Defences = Literal["standard", "none"]

STANDARD: Mapping[str, Any] = {
    "raters": "same_key",
    "max_share_per_key": 0.2,
    "max_share_per_user": 0.02,
    "quarantine": {},
    "promotion": {"max_mismatch": 0.05, "min_entropy": 0.02},
}
"""A few per cent of poisoned preferences steer a model (Best-of-Venom, arXiv 2404.05530): no user may have so many.
The bounds of the gate need no data that is held out: a collapsed policy, or one far from its samples, is not served."""


def with_defences(data: Any) -> Any:
    """The section `online` as it was written, and of `standard` whatever it does not say itself."""
    if not isinstance(data, Mapping) or data.get("defences") != "standard":
        return data
    written = {name: _under(STANDARD[name], value) for name, value in data.items() if name in STANDARD}
    return {**STANDARD, **data, **written}


def _under(preset: Any, written: Any) -> Any:
    """A section that is written in part keeps the rest of the preset."""
    return {**preset, **written} if isinstance(preset, Mapping) and isinstance(written, Mapping) else written
