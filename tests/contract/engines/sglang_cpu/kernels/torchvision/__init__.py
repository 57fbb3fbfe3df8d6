"""Stub of torchvision, which SGLang imports for models that see images. The builds of the index need a GPU's torch."""

from __future__ import annotations

import enum
import sys
from typing import Any

from absent import absent, absent_modules

__version__ = "0.0"


class InterpolationMode(enum.Enum):
    """Values that transformers and SGLang use in tables when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


absent_modules(__name__, "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io")
for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"{__name__}.{name}")
