"""Export of a checkpoint as a whole model: ``python -m penstock.services.trainer.checkpoint.export CHECKPOINT TARGET``.

A checkpoint of whole weights already is a model directory. One with an adapter has peft's format and needs the base
model; the export merges the adapter into the base weights and writes files that any engine and ``from_pretrained``
read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from penstock.services.trainer.checkpoint.state import read_manifest
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.config.model import ModelConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.loading import build_model, build_tokenizer

__all__ = ["export", "write_whole"]


def export(checkpoint: Path, target: Path) -> None:
    """Write weights, configuration and tokenizer of the policy in ``checkpoint`` to ``target``.

    Raises:
        CheckpointError: ``checkpoint`` is not committed or holds an embodied policy, or ``target`` is not empty.
        ConfigError: the base model of its adapter cannot be loaded.
    """
    found = read_manifest(checkpoint)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: name a new directory")
    job = parse_training(msgspec.json.decode(found.manifest.meta["config"]))
    if isinstance(job, EmbodiedJob):
        raise CheckpointError(
            f"{checkpoint} holds the policy of an embodied job, which is no Hugging Face model: its weights are in "
            "model.safetensors, its layers and its simulator in config.json; penstock.shared.models.episode_policy "
            "builds it"
        )
    write_whole(checkpoint, target, job.model)


def write_whole(source: Path, target: Path, trained: ModelConfig) -> None:
    """Write the model in ``source`` with its tokenizer to ``target``, with an adapter merged into the base weights.

    ``trained``: model section of the job that trained the model.

    Raises:
        ConfigError: the model, or the base model of its adapter, cannot be loaded.
    """
    config = ModelConfig(path=str(source), dtype=trained.dtype, trust_remote_code=trained.trust_remote_code)
    tokenizer = build_tokenizer(config)
    build_model(config, len(tokenizer), seed=0).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Run the export with the two paths from the command line."""
    parser = argparse.ArgumentParser(description="Write the policy of a checkpoint as a whole model.")
    parser.add_argument("checkpoint", type=Path, help="directory of a committed checkpoint")
    parser.add_argument("target", type=Path, help="directory to write, new or empty")
    args = parser.parse_args()
    export(args.checkpoint, args.target)


if __name__ == "__main__":
    main()
