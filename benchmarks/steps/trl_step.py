"""TRL's training step: its own GRPOTrainer in its own training loop, fed with the completions of the batch where it
would generate and score. Runs in TRL's own environment.

    python -m steps.trl_step WORKLOAD MODEL [--threads 2] [--device cpu] [--dtype float32]

The clock runs from the loop's ``on_step_begin`` to its ``on_step_end``: forward, loss and its statistics, backward,
clip, optimizer, schedule. Generation, rewards, data loading and logging are outside.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import trl  # type: ignore[import-not-found,unused-ignore]  # noqa: E402  # in TRL's environment only
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402

from steps.options import note, options, parser, turns_on  # noqa: E402
from steps.turns import Turns  # noqa: E402
from steps.workload import BATCH_FILE, CLIP, LEARNING_RATE, MAX_GRAD_NORM, WORKLOADS, Batch, Workload  # noqa: E402


class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """One step for each turn's step; the loop waits inside ``on_step_begin``."""

    def __init__(self, turns: Turns, device: str, forwarded: int) -> None:
        self._turns, self._device, self._forwarded = turns, device, forwarded

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self._turns.begin():
            sys.exit(0)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._turns.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "grad_norm" in logs:
            loss, norm = float(logs["loss"]), float(logs["grad_norm"])
            note(self._turns, self._device, loss=loss, grad_norm=norm, forwarded=self._forwarded)


def _scored(batch: Batch, device: str) -> dict[str, torch.Tensor]:
    """Batch in the form that ``_generate_and_score_completions`` returns."""
    given = {name: torch.from_numpy(array) for name, array in batch.padded().items()}
    given["advantages"] = torch.from_numpy(batch.advantages())
    given["num_items_in_batch"] = torch.tensor(float(batch.trained))
    return {name: tensor.to(device) for name, tensor in given.items()}


def _config(args: Any, workload: Workload, directory: str) -> Any:
    return trl.GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=workload.rows_per_pass,
        gradient_accumulation_steps=workload.completions // workload.rows_per_pass,
        num_generations=workload.group_size,
        max_completion_length=workload.completion_tokens[1],
        max_steps=1_000_000,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        beta=0.0,
        epsilon=CLIP,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=args.device == "cpu",
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )


def main() -> None:
    """Make steps when told to."""
    args = options(parser())
    turns = turns_on(args.device)
    workload, batch = WORKLOADS[args.workload], Batch.read(args.model / BATCH_FILE)
    scored = _scored(batch, args.device)
    forwarded = len(batch.completions) * (scored["prompt_ids"].shape[1] + scored["completion_ids"].shape[1])
    with tempfile.TemporaryDirectory(prefix="trl-step-") as directory:
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=_config(args, workload, directory),
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * workload.completions),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer._generate_and_score_completions = lambda _: dict(scored)
        trainer.add_callback(Clock(turns, args.device, forwarded))
        trainer.train()


if __name__ == "__main__":
    main()
