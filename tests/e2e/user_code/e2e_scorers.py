"""Scorers as users write them, the bad ones included. The reward service imports this file by PYTHONPATH."""

from __future__ import annotations

import random
import time
import zlib
from typing import Any


def fingerprint(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Return a number in [0, 1) that depends on prompt and completion."""
    return zlib.crc32(f"{prompt}|{completion}".encode()) % 1000 / 1000


def draws_lots(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Return a random number: no policy can raise its mean."""
    return random.random()


def paced(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Return the fingerprint after a pause, so that a job lasts long enough for faults on a fast machine, too."""
    time.sleep(0.005)
    return fingerprint(prompt, completion, answer, row)


def as_they_come(row: dict[str, Any]) -> float:
    """Curriculum that changes nothing, but has to be imported."""
    return 0.0


def raises(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    raise ValueError("the judge is out to lunch")


def raises_markup(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    raise ValueError("<img src=x onerror=window.attacked=true>")


def hangs(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    time.sleep(3600)
    return 1.0


def not_a_number(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    return float("nan")


def sometimes(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Raise ValueError for about one completion in four."""
    number = fingerprint(prompt, completion, answer, row)
    if number < 0.25:
        raise ValueError("not this one")
    return number


def raises_at_times(prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
    """Raise a ValueError that names the completion, for about one completion in four."""
    found = fingerprint(prompt, completion, answer, row)
    if found < 0.25:
        raise ValueError(f"no answer in {completion!r}")
    return found
