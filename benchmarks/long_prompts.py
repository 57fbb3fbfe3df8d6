"""How long prompts that arrive hold up a completion that runs, in the embedded engine.

    python benchmarks/long_prompts.py [--out results.json] [--prompts 32] [--length 1000] [--rounds 2]

One completion of a model of about 30 M parameters decodes; then prompts of random tokens come, all at once, each for 16
new tokens. Measured are the longest pause of the running completion between two of its tokens, and the seconds until
all are done: with as many prompt tokens in a forward pass as the engine takes, and with all of them in one pass. Both
take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Report

from penstock.services.rollout.engines import EmbeddedEngine
from penstock.services.rollout.engines.embedded import parts
from penstock.shared.config.model import ModelConfig
from penstock.shared.models import build_model
from penstock.shared.protocol.generation import GenRequest, Sampling

MODEL = {
    "config": {
        "hidden_size": 512, "intermediate_size": 1408, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4,
        "max_position_embeddings": 4096,
    },
    "tokenizer": "char",
}  # fmt: skip
VOCAB, NEW_TOKENS, RUNNING = 2000, 16, 64
PAUSE_RATIO, TIME_RATIO = 4.0, 1.15
LIMIT_S = 900.0


@dataclass
class Round:
    """Seconds of the longest pause, and until all prompts are done; tokens of the running completion meanwhile."""

    pause_s: float
    seconds: float
    tokens: int


async def one_round(engine: EmbeddedEngine, num_prompts: int, length: int) -> Round:
    """Let prompts come while one completion runs."""
    generator, told = torch.Generator().manual_seed(0), [time.perf_counter()]

    def asked(name: str, num_tokens: int, new: int) -> GenRequest:
        ids = torch.randint(0, VOCAB, (num_tokens,), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=new, ignore_eos=True, seed=1)
        return GenRequest(request_id=name, prompt_ids=ids, n=1, sampling=sampling)

    running = asyncio.create_task(
        engine.generate(asked("running", 8, 4000), lambda *_: told.append(time.perf_counter()))
    )
    while len(told) < 20:
        await asyncio.sleep(0.005)
    first, began = len(told), time.perf_counter()
    await asyncio.gather(*(engine.generate(asked(str(i), length, NEW_TOKENS)) for i in range(num_prompts)))
    seconds = time.perf_counter() - began
    pauses = [later - earlier for earlier, later in zip(told[first - 1 :], told[first:], strict=False)]
    running.cancel()
    await asyncio.wait([running])
    return Round(max(pauses), seconds, len(pauses))


async def measure(num_prompts: int, length: int, rounds: int) -> dict[str, list[Round]]:
    """Rounds of both, in turns."""
    model = build_model(ModelConfig.model_validate(MODEL), VOCAB, seed=0).eval()
    engine = EmbeddedEngine(model, max_running=RUNNING, stop_ids=[], detokenize=str)
    usual, found = parts.PASS_TOKENS, dict[str, list[Round]](bounded=[], unbounded=[])
    await engine.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            for number in range(rounds + 1):
                for name, room in (("bounded", usual), ("unbounded", num_prompts * length)):
                    parts.PASS_TOKENS = room
                    one = await one_round(engine, num_prompts, length)
                    if number:  # the first round warms up
                        found[name].append(one)
    finally:
        parts.PASS_TOKENS = usual
        await engine.close()
    return found


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    report = Report("Long prompts", ["prompt tokens in a pass", "longest pause s", "all done s", "tokens meanwhile"])
    found = asyncio.run(measure(args.prompts, args.length, args.rounds))
    pause, seconds = {}, {}
    for name, some in found.items():
        pause[name] = statistics.median(one.pause_s for one in some)
        seconds[name] = statistics.median(one.seconds for one in some)
        tokens = statistics.median(one.tokens for one in some)
        room = parts.PASS_TOKENS if name == "bounded" else args.prompts * args.length
        report.row(str(room), f"{pause[name]:.2f}", f"{seconds[name]:.1f}", f"{tokens:.0f}")
        report.results[name] = {"pause_s": pause[name], "seconds": seconds[name], "tokens": tokens}
    report.check(f"the pause is at most 1/{PAUSE_RATIO:g}", pause["bounded"] * PAUSE_RATIO <= pause["unbounded"])
    report.check(f"all done within {TIME_RATIO:g} of the time", seconds["bounded"] <= TIME_RATIO * seconds["unbounded"])
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
