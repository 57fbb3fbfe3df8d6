"""The embedded engine, fed with whole groups or with groups whose first completion finds a free row.

    python -m decoding.feeding MODEL DIRECTORY

A turn is a step for each rule of ``RULES``. Lengths are lognormal; half of the variance is that of the prompt.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from steps.turns import Turns

from decoding.systems import ask, opened
from decoding.workload import GROUP, MODELS, PROMPT, Completion, lognormal, longest
from penstock.services.rollout.engines import EmbeddedEngine
from penstock.services.rollout.group_maker import HeldRows, room_for

__all__ = ["NUM_GROUPS", "ROWS", "RULES"]

ROWS, NUM_GROUPS = 16, 32
RULES = ("whole", "rows")
"""A group is begun when all its completions find a row, or when the first one does, as a rollout worker does."""


def ragged_groups(size: str, seed: int) -> list[list[Completion]]:
    """Groups of one prompt each."""
    model, numbers = MODELS[size], random.Random(f"groups {seed}")
    groups = []
    for _ in range(NUM_GROUPS):
        prompt = [numbers.randrange(3, model.vocab_size) for _ in range(PROMPT)]
        of_prompt = numbers.gauss(0, 1)
        median = model.new_tokens / 2
        groups.append([Completion(prompt, lognormal(numbers, median, shared=of_prompt)) for _ in range(GROUP)])
    return groups


async def feed(engine: EmbeddedEngine, groups: Sequence[Sequence[Completion]], rule: str) -> None:
    """Decode all groups in order."""
    changed = asyncio.Event()
    held, in_hand = HeldRows(changed.set), 0

    def room() -> int:
        if rule == "whole":
            return max(1, ROWS // GROUP) - in_hand
        waiting = in_hand - held.num_groups
        return room_for(rows=ROWS, completions=GROUP, held=held.number, num_waiting=waiting, num_written=0)

    async def make(place: int, group: Sequence[Completion]) -> None:
        nonlocal in_hand
        with held.group(len(group)) as free:
            await asyncio.gather(*(complete(place * GROUP + i, one, free) for i, one in enumerate(group)))
        in_hand -= 1
        changed.set()

    async def complete(number: int, one: Completion, free: Callable[[], None]) -> None:
        await ask(engine, number, one)
        free()

    async with asyncio.TaskGroup() as tasks:
        for place, group in enumerate(groups):
            while room() <= 0:
                changed.clear()
                await changed.wait()
            in_hand += 1
            tasks.create_task(make(place, group))


def main() -> None:
    """Decode until the end of input."""
    size, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    turns, loop = Turns(), asyncio.new_event_loop()
    engine = opened(directory, ROWS, longest(MODELS[size]))
    loop.run_until_complete(engine.start())
    loop.run_until_complete(feed(engine, ragged_groups(size, -1)[:4], RULES[0]))
    step = 0
    while turns.begin():
        seed, place = divmod(step, len(RULES))
        loop.run_until_complete(feed(engine, ragged_groups(size, seed), RULES[place]))
        turns.end()
        step += 1


if __name__ == "__main__":
    main()
