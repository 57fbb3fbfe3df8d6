"""The command line that every system has: workload, files, threads, device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from steps.turns import Turns
from steps.workload import WORKLOADS

__all__ = ["note", "options", "parser", "turns_on"]


def parser() -> argparse.ArgumentParser:
    """To be extended by a system with options of its own."""
    made = argparse.ArgumentParser()
    made.add_argument("workload", choices=WORKLOADS)
    made.add_argument("model", type=Path)
    made.add_argument("--threads", type=int, default=0, help="0: torch's default")
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    return made


def options(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, and set the threads."""
    import torch

    args = made.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def turns_on(device: str) -> Turns:
    """Turns whose clock waits for the device; call it first, because later output of libraries would be a reply."""
    import torch

    return Turns(torch.cuda.synchronize, torch.cuda.empty_cache) if device == "cuda" else Turns()


def note(turns: Turns, device: str, *, loss: float, grad_norm: float, forwarded: int) -> None:
    """Facts of the step just made; ``forwarded``: positions that went through the layers, padding included."""
    import torch

    facts: dict[str, Any] = {"loss": loss, "grad_norm": grad_norm, "forwarded": forwarded}
    if device == "cuda":
        facts["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    turns.note(**facts)
