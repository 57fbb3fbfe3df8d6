"""The weights and the batch of a workload, as files that every system loads.

    python -m steps.checkpoint ragged DIRECTORY [--device cpu] [--seed 0]

Writes a Hugging Face directory with random weights, the batch with the log-probs that these weights give it, and
``facts.json``: parameters, tokens, and floating-point operations of a step.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from penstock.services.trainer.flops import ModelFlops, Work
from penstock.services.trainer.learners.learner import Learner
from penstock.shared.models.decoder import selected_logprobs
from steps.groups import job, packed
from steps.workload import BATCH_FILE, WORKLOADS, Batch, Workload

__all__ = ["create"]


def create(workload: Workload, directory: Path, *, device: str, seed: int) -> None:
    """Write all files."""
    config = job(workload)
    learner = Learner(config, device=device)
    batch = _scored(Batch.draw(workload, seed), learner, config.train.max_tokens_per_microbatch)
    learner.model.save_pretrained(directory)
    learner.tokenizer.save_pretrained(directory)
    batch.write(directory / BATCH_FILE)
    work = Work()
    for microbatch in packed(batch, config.train.max_tokens_per_microbatch)[1]:
        work.add(microbatch, passes=3)
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in learner.weights()]
    facts = {
        "parameters": sum(tensor.numel() for _, tensor in learner.weights()),
        "completions": len(batch.completions),
        "trained_tokens": batch.trained,
        "flops": ModelFlops.of(layout).forward(work),
    }
    (directory / "facts.json").write_text(json.dumps(facts) + "\n")


@torch.no_grad()
def _scored(batch: Batch, learner: Learner, max_tokens: int) -> Batch:
    columns, microbatches = packed(batch, max_tokens)
    flat = np.zeros(batch.trained, np.float32)
    for microbatch in (m.to(learner.model.device) for m in microbatches):
        logprobs_M, _ = selected_logprobs(
            learner.model, microbatch.tokens, microbatch.select_M, microbatch.targets_M, temperature=1.0, entropy=False
        )
        flat[microbatch.source_M.cpu().numpy()] = logprobs_M.cpu().numpy()
    return replace(batch, logprobs=np.split(flat, np.cumsum(columns.length_B)[:-1]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    create(WORKLOADS[args.workload], args.directory, device=args.device, seed=args.seed)


if __name__ == "__main__":
    main()
