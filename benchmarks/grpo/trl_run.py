"""The task with TRL's GRPOTrainer; runs in TRL's own environment.

python -m grpo.trl_run WORKLOAD MODEL ROWS RESULT --steps 100 [--goal 0.9] [--seed 0] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}.items():
    os.environ.setdefault(name, value)

from grpo import task  # noqa: E402

START = time.time()


def main() -> None:
    """Train and write the result."""
    args = _arguments()
    import torch
    import transformers
    import trl  # type: ignore[import-not-found,unused-ignore]  # in TRL's environment only
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    if args.threads:
        torch.set_num_threads(args.threads)
    workload = task.WORKLOADS[args.workload]
    reward = getattr(task, workload.reward)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    steps: list[task.Step] = []
    began: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.time())

        def on_log(self, options: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> Any:
            if logs and "reward" in logs:
                tokens = logs["completions/mean_length"] * task.BATCH
                steps.append(task.Step(time.time(), logs["reward"], tokens, time.process_time()))
                if args.goal and task.reached([s.reward for s in steps[-10:]], args.goal):
                    control.should_training_stop = True
            return control

    def rewards(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [reward(p, c, a, {}) for p, c, a in zip(prompts, completions, answer, strict=True)]

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=rewards,
        args=trl.GRPOConfig(
            output_dir=str(args.result.with_suffix(".trl")),
            per_device_train_batch_size=task.BATCH,
            num_generations=task.GROUP,
            max_completion_length=workload.max_new_tokens,
            generation_kwargs={"min_new_tokens": workload.min_new_tokens} if workload.min_new_tokens else None,
            max_steps=args.steps,
            learning_rate=task.LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            epsilon=0.2,
            temperature=1.0,
            shuffle_dataset=False,
            seed=args.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    facts = {"threads": torch.get_num_threads(), "versions": versions, "loss": trainer.loss_type}
    task.write_run(args.result, task.Run("trl", began[0], began[0] - START, steps, facts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=task.WORKLOADS)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--goal", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
