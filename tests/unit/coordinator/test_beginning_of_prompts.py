"""The note of a dry run on how plain prompts begin agrees with the tokenizer that the workers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.services.coordinator.submission import beginning_note
from penstock.shared.config.jobs.job import JobConfig

VOCAB = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}
BEGIN = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
END = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
LIKE_LLAMA = processors.Sequence([processors.ByteLevel(), BEGIN])
LIKE_ROBERTA = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))


def saved(folder: Path, rules: Any) -> Path:
    core = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if rules is not None:
        core.post_processor = rules
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def job_with(tokenizer: Path, **prompt: object) -> JobConfig:
    return JobConfig.parse({
        "name": "tiny", "model": {"config": {}, "tokenizer": str(tokenizer)},
        "data": {"train": {"type": "addition"}, "prompt": prompt},
        "reward": {"scorers": [{"type": "exact"}]}, "train": {"max_updates": 1},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "begins"),
    [(None, False), (BEGIN, True), (END, False), (LIKE_LLAMA, True), (LIKE_ROBERTA, True)],
    ids=["none", "begin", "end", "like-llama", "like-roberta"],
)
def test_the_note_about_add_bos_agrees_with_the_tokenizer(tmp_path: Path, rules: Any, begins: bool) -> None:
    folder = saved(tmp_path, rules)
    assert (AutoTokenizer.from_pretrained(folder)("a").input_ids[0] == 0) is begins
    (note,) = beginning_note(job_with(folder))
    assert note.startswith("data.prompt.add_bos: prompts begin with " + ("'<s>'" if begins else "their text"))
    assert beginning_note(job_with(folder, add_bos=False)) == []
