"""Tokens per second and cache memory of the embedded engine with groups that share their prompt's keys and values.

    python benchmarks/shared_prompts.py [--models 1m 30m] [--prompts 16 128 512] [--rounds 3] [--out results.json]

Groups of completions of 64 tokens are decoded in one batch, with sharing and with a copy of the prompt in each row, in
turns, with one thread. Ratios are medians over rounds, of CPU seconds, which hold on a busy machine, too. Prompts that
the engine does not share by itself are shared here all the same: the table shows from which length on it pays.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median

import torch
from decoding.workload import MODELS
from report import Report

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded import prefixes
from penstock.services.rollout.engines.embedded.batch import Batch
from penstock.shared.config.model import ModelConfig
from penstock.shared.models import build_model
from penstock.shared.protocol.generation import Sampling

NEW_TOKENS, MAX_LENGTH = 64, 1024
NEVER = 1 << 30


def decode(batch: Batch, vocab: int, *, length: int, rows: int, size: int, seed: int) -> tuple[float, int]:
    """Decode groups of ``size`` completions; return CPU seconds and the bytes of the cache."""
    numbers = random.Random(seed)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [[numbers.randrange(3, vocab) for _ in range(length)] for _ in range(rows // size)]
    start = time.process_time()
    batch.admit([Completion(row, 0, prompts[row // size], sampling, (), row) for row in range(rows)])
    batch.run(1, lambda: False)
    held = batch.cache_bytes
    while batch.count:
        batch.run(8, lambda: False)
    return time.process_time() - start, held


def measure(name: str, length: int, rows: int, size: int, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return (CPU seconds, bytes) of each round, with sharing and without."""
    config = {**MODELS[name].architecture, "max_position_embeddings": MAX_LENGTH}
    vocab = MODELS[name].vocab_size
    model = build_model(ModelConfig.parse({"config": config, "tokenizer": "char"}), vocab, seed=0).eval()
    found: dict[str, list[tuple[float, int]]] = {"shared": [], "copied": []}
    for turn in range(rounds + 1):
        for way in list(found)[:: 1 if turn % 2 else -1]:
            prefixes.SHARED_FROM = 1 if way == "shared" else NEVER
            batch = Batch(model, max_running=rows, max_length=MAX_LENGTH, detokenize=str, version=0)
            one = decode(batch, vocab, length=length, rows=rows, size=size, seed=turn)
            if turn:  # the first one warms up
                found[way].append(one)
    return found


def main() -> int:
    """Command line; the exit status is 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1m", "30m"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    usual = prefixes.SHARED_FROM
    report = Report(
        f"{args.rows} rows in groups of {args.group}, {NEW_TOKENS} new tokens each, float32, one thread",
        ["model", "shared tok/CPU s", "copied tok/CPU s", "ratio", "shared MiB", "copied MiB"],
    )
    for name in args.models:
        for length in args.prompts:
            found = measure(name, length, args.rows, args.group, args.rounds)
            rates = {way: median(args.rows * NEW_TOKENS / s for s, _ in turns) for way, turns in found.items()}
            ratio = median(
                copied / shared for (shared, _), (copied, _) in zip(found["shared"], found["copied"], strict=True)
            )
            mib = {way: turns[0][1] / (1 << 20) for way, turns in found.items()}
            report.row(
                f"{name}, prompt {length}", f"{rates['shared']:,.0f}", f"{rates['copied']:,.0f}", f"{ratio:.2f}",
                f"{mib['shared']:.1f}", f"{mib['copied']:.1f}",
            )  # fmt: skip
            report.results[f"{name}.{length}"] = {"tokens_per_cpu_s": rates, "ratio": ratio, "mib": mib}
            if length > usual and args.group > 1:
                report.check(f"{name}, prompt {length}: {ratio:.2f} times a copy per row, goal 1", ratio >= 1)
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
