"""EleutherAI's evaluation harness: generation, and multiple choice by likelihood, with prompts as token ids.

Run as ``lm_eval.py URL KEY MODEL TOKENIZER``.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate

URL, KEY, MODEL, TOKENIZER = sys.argv[1:5]
SAYS = "hello world and more"
ROWS = [
    {"question": "hi", "choices": ["hello", " more", "ld"], "answer": 0, "says": SAYS},
    {"question": "hihello", "choices": ["hi", " wor", " and"], "answer": 1, "says": SAYS.removeprefix("hello")},
    {"question": "again", "choices": ["hi", "hello", "lala"], "answer": 2, "says": "something else"},
]


def tasks(rows: Path) -> list[dict[str, Any]]:
    """Return one task of each kind over the same rows."""
    data = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test",
        "doc_to_text": "{{question}}", "target_delimiter": "",
    }  # fmt: skip
    return [
        {
            **data, "task": "says", "output_type": "generate_until", "doc_to_target": "{{says}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 16, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        {
            **data, "task": "chooses", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ]  # fmt: skip


def main() -> None:
    """Run the client and print the number of answers."""
    os.environ["OPENAI_API_KEY"] = KEY
    rows = Path("rows.jsonl").absolute()
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = {
        "model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": TOKENIZER, "tokenizer_backend": "huggingface",
        "num_concurrent": 2, "max_retries": 1, "max_length": 256,
    }  # fmt: skip
    found = simple_evaluate(model="local-completions", model_args=model, tasks=tasks(rows), log_samples=False)
    results = found["results"]
    assert results["chooses"]["acc,none"] == 1.0, results
    assert abs(results["says"]["exact_match,none"] - 2 / 3) < 1e-6, results
    print(json.dumps({"version": version("lm-eval"), "answers": 3 + 9}))


main()
