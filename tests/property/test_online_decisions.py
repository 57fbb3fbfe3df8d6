"""Decisions on live data depend on the streams alone, and no user dominates the batches."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.shared.protocol.events import encode_events

SHARES = Path(__file__).with_name("test_online_shares.py")


def load() -> ModuleType:
    """Load the neighbouring test module, which has a job under traffic."""
    spec = importlib.util.spec_from_file_location("online_shares", SHARES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["online_shares"] = module
    spec.loader.exec_module(module)
    return module


def decisions() -> str:
    """Return a digest of all decisions on the same traffic of a few keys."""
    world: Any = load()
    shares = {"max_share_per_key": 0.5, "max_share_per_asker": 0.5, "max_share_per_user": 0.5}
    flood, chance = world.Flood(world.job(batch=8, **shares)), random.Random(7)
    for _ in range(80):
        flood.traffic(chance.choice(world.HONEST[:5]), chance.choice(world.HONEST[:3]))
        if chance.random() < 0.1:
            flood.passes(11.0)
    assert len(flood.batches) > 2
    return hashlib.sha256(b"".join(encode_events(events) for events in flood.entries)).hexdigest()


@pytest.mark.long
def test_the_same_streams_give_the_same_decisions_in_every_process() -> None:
    """Decisions depend on no set order, no clock and no random number."""
    found = {decisions()}
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, __file__], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            timeout=120, check=True,
        )  # fmt: skip
        found.add(run.stdout.strip())
    assert len(found) == 1


def test_a_user_who_sends_nine_tenths_of_the_traffic_has_two_percent_of_each_batch() -> None:
    world: Any = load()
    flood = world.Flood(world.job(batch=50, max_share_per_user=0.02))
    for number in range(49):
        for _ in range(9):
            flood.traffic("loud", "judge")
        flood.traffic(f"customer-{number}", "judge")
    (batch,) = flood.batches
    assert len(batch) == 50
    assert sum(one.user == "loud" for one in batch) == 1


if __name__ == "__main__":
    print(decisions())
