"""Rows become prompts: templates, chat, lengths, warm-start batches; and the check at submit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.services.coordinator.submission import plan_job
from penstock.shared.config.data import DataConfig, PromptConfig, source_names
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data import check
from penstock.shared.data.check import check_data
from penstock.shared.data.prompts import PromptBuilder, PromptSource
from penstock.shared.data.rows import open_rows
from penstock.shared.errors import ConfigError, DataError

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if think is defined %}{{ think }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and the chat template above."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    vocab |= {chr(code): 4 + i for i, code in enumerate([10, *range(32, 127)])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}+1=", "a": i + 1, "tag": {"n": i}}) + "\n" for i in range(12)))
    return path


def test_plain_prompt(tokenizer: Any) -> None:
    config = PromptConfig(template="Q: {q} ({tag[n]})", answer="{a:.1f}", system="Be brief.", add_bos=True)
    prompt = PromptBuilder(config, tokenizer).build({"q": "1+1=", "a": 2, "tag": {"n": 7}})
    assert prompt.text == "Be brief.\nQ: 1+1= (7)"
    assert prompt.answer == "2.0"
    assert prompt.token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(prompt.token_ids[1:]) == prompt.text
    assert not prompt.too_long


def test_a_plain_field_becomes_a_chat(tokenizer: Any) -> None:
    """The chat consists of the system message and one user message, which the template gives."""
    config = PromptConfig(template="Solve: {q}", chat=True, system="Be brief.", answer="{a}")
    prompt = PromptBuilder(config, tokenizer).build({"q": "1+1=", "a": 2})
    assert prompt.text == "[system]Be brief.[user]Solve: 1+1=[assistant]"
    assert prompt.answer == "2"
    plain = PromptConfig(template="{q}", chat=True, answer=None)
    assert PromptBuilder(plain, tokenizer).build({"q": "hi"}).text == "[user]hi[assistant]"
    with pytest.raises(DataError, match="no field 'q'"):
        PromptBuilder(plain, tokenizer).build({"a": 2})


@pytest.mark.parametrize(
    ("more", "message"), [({"messages": "m"}, "is a chat already"), ({"add_bos": True}, "writes its own")]
)
def test_contradicting_chat_settings_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptConfig(chat=True, **more)


def test_chat_prompt_renders_template_with_arguments(tokenizer: Any) -> None:
    config = PromptConfig(messages="m", system="S", answer=None, chat_template_args={"think": "<no>"})
    prompt = PromptBuilder(config, tokenizer).build({"m": [{"role": "user", "content": "hi"}]})
    assert prompt.text == "[system]S[user]hi[assistant]<no>"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.answer is None


def test_too_long_is_marked_not_cut(tokenizer: Any) -> None:
    builder = PromptBuilder(PromptConfig(max_tokens=4, answer=None), tokenizer)
    assert not builder.build({"prompt": "1234"}).too_long
    long = builder.build({"prompt": "12345"})
    assert long.too_long
    assert len(long.token_ids) == 5


@pytest.mark.parametrize(
    ("config", "row", "message"),
    [
        ({}, {"question": "x", "answer": 1}, r"no field 'prompt' that data\.prompt\.template needs.*answer, question"),
        ({}, {"prompt": "x"}, r"no field 'answer' that data\.prompt\.answer needs"),
        ({"answer": "{prompt:d}"}, {"prompt": "x"}, "cannot be filled in"),
        ({"template": "{prompt[k]}"}, {"prompt": {}, "answer": ""}, "cannot be filled in"),
        ({"template": "{prompt"}, {}, "not a format string"),
        ({"template": "{}"}, {}, "placeholder without a field name"),
        ({"messages": "m"}, {"answer": 1}, "no field 'm'"),
        ({"messages": "m"}, {"m": "hi", "answer": 1}, "must be a list of messages"),
        ({"messages": "m"}, {"m": [{"role": "user"}], "answer": 1}, "must be a list of messages"),
        ({"template": "{p}", "answer": None}, {"p": ""}, "prompt is empty"),
        ({"template": "{p:>8000000000}"}, {"p": "x", "answer": 1}, "above the largest width, 1000"),
        ({"template": "{p:>{n}}"}, {"p": "x", "n": 1001, "answer": 1}, "above the largest width, 1000"),
        ({"template": "{p:.{n}f}"}, {"p": 0.5, "n": "9" * 5000, "answer": 1}, "above the largest width, 1000"),
    ],
)
def test_bad_rows_and_templates(tokenizer: Any, config: dict[str, Any], row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptBuilder(PromptConfig(**config), tokenizer).build(row)


def test_missing_special_token(tokenizer: Any) -> None:
    core = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="no beginning-of-sequence token"):
        PromptBuilder(PromptConfig(add_bos=True), core)


def make_config(path: Path, **prompt: Any) -> DataConfig:
    return DataConfig.parse({
        "train": {"type": "file", "path": str(path)},
        "eval": [{"type": "file", "path": str(path), "limit": 2}, {"type": "addition", "num_rows": 3}],
        "prompt": {"template": "{q}", "answer": "{a}", **prompt},
    })  # fmt: skip


def test_prompt_source(tokenizer: Any, train_file: Path) -> None:
    config = DataConfig.parse(
        {**make_config(train_file).model_dump(), "eval": [{"type": "file", "path": str(train_file), "limit": 2}]}
    )
    source = PromptSource(config, tokenizer, seed=1)
    assert (source.rows_per_epoch, source.num_eval) == (12, 2)
    texts = [source.train(i).text for i in range(24)]
    assert sorted(texts[:12]) == sorted(texts[12:])
    assert texts[:12] != texts[12:]
    assert [source.eval(i).text for i in range(2)] == ["0+1=", "1+1="]
    with pytest.raises(IndexError):
        source.eval(2)
    again = PromptSource(config, tokenizer, seed=1)
    assert [again.train(i).text for i in (23, 5, 0)] == [texts[23], texts[5], texts[0]]


def test_sources_have_names(tokenizer: Any, train_file: Path) -> None:
    file, addition = {"type": "file", "path": str(train_file), "limit": 3}, {"type": "addition"}
    plain = [{**addition, "name": "addition-2"}, addition, file, addition, addition]
    names = ["addition-2", "addition", "file", "addition-3", "addition-4"]
    config = DataConfig.parse({"train": plain, "eval": [file, addition], "prompt": {"answer": None}})
    assert source_names(config.train) == names
    assert source_names(config.eval) == ["file", "addition"]
    summary = check_data(DataConfig.parse({"train": plain, "prompt": {"template": "?", "answer": None}}))
    assert [(source.name, source.rows) for source in summary.train[1:3]] == [("addition", 4096), ("file", 3)]
    for key in ("train", "eval"):
        twice = {"train": [addition], key: [{**file, "name": "hard"}, {**addition, "name": "hard"}]}
        with pytest.raises(ConfigError, match=f"{key}: several sources have the name 'hard'"):
            DataConfig.parse(twice)
    for wrong in ("", "Hard", "a/b", "x" * 33):
        with pytest.raises(ConfigError, match=r"train\.0\.name: String should match"):
            DataConfig.parse({"train": {**addition, "name": wrong}})


def test_a_prompt_names_its_source(tokenizer: Any) -> None:
    easy, hard = {"type": "addition", "num_rows": 4}, {"type": "addition", "num_rows": 4, "digits": 3, "name": "hard"}
    source = PromptSource(DataConfig.parse({"train": [easy, hard], "eval": [easy, hard]}), tokenizer, seed=1)
    drawn = [source.train(ordinal) for ordinal in range(8)]
    assert sorted(prompt.source for prompt in drawn) == ["addition"] * 4 + ["hard"] * 4
    assert all(len(prompt.text) == 4 for prompt in drawn if prompt.source == "addition")
    assert any(len(prompt.text) > 4 for prompt in drawn if prompt.source == "hard")
    assert [source.eval(index).source for index in range(8)] == ["addition"] * 4 + ["hard"] * 4


def test_warm_start_batches_are_seeded_and_end_with_eos(tokenizer: Any, train_file: Path) -> None:
    source = PromptSource(make_config(train_file, max_tokens=4), tokenizer, seed=1)
    batches = list(source.warm_start_batches(4, steps=5, seed=9))
    assert [len(batch) for batch in batches] == [4] * 5
    assert batches == list(source.warm_start_batches(4, steps=5, seed=9))
    assert batches != list(source.warm_start_batches(4, steps=5, seed=8))
    pairs = [pair for batch in batches for pair in batch]
    for prompt_ids, answer_ids, mask in pairs:
        assert mask == [1] * len(answer_ids)
        assert answer_ids[-1] == tokenizer.eos_token_id
        assert int(tokenizer.decode(answer_ids[:-1])) == int(tokenizer.decode(prompt_ids)[:-3]) + 1
    assert len({tuple(prompt_ids) for prompt_ids, *_ in pairs}) == 10  # the two rows of five characters are left out


def test_demonstrations_may_differ_from_the_prompts_of_the_run(tokenizer: Any, train_file: Path) -> None:
    data = make_config(train_file).model_dump()
    job = {"name": "j", "model": {"config": {}, "tokenizer": "char"}, "data": data, "train": {"max_updates": 1}}
    job["reward"] = {"scorers": [{"type": "exact"}]}
    few = JobConfig.parse({**job, "warm_start": {"data": [{"type": "file", "path": str(train_file), "limit": 3}]}})
    assert JobConfig.parse(job).warm_start_data == few.data
    source = PromptSource(few.warm_start_data, tokenizer, seed=1)
    shown = {tokenizer.decode(ids) for batch in source.warm_start_batches(3, steps=4, seed=9) for ids, *_ in batch}
    assert shown == {"0+1=", "1+1=", "2+1="}
    assert PromptSource(few.data, tokenizer, seed=1).rows_per_epoch == 12


def test_a_demonstration_alternates_between_policy_and_environment(tokenizer: Any, train_file: Path) -> None:
    parts = ["{q}", "+9", "={a}"]
    source = PromptSource(make_config(train_file), tokenizer, seed=1, demonstration=parts)
    for row in next(source.warm_start_batches(4, steps=1, seed=9)):
        prompt, text = tokenizer.decode(row.prompt_ids), tokenizer.decode(row.answer_ids[:-1])
        assert text == f"{prompt}+9={int(prompt[:-3]) + 1}"
        start = len(prompt)
        assert row.mask == [1] * start + [0, 0] + [1] * (len(row.answer_ids) - start - 2)
        assert row.answer_ids[-1] == tokenizer.eos_token_id


def test_an_impossible_warm_start_is_refused_with_the_reason(tokenizer: Any, train_file: Path) -> None:
    with pytest.raises(DataError, match="every prompt is longer"):
        next(PromptSource(make_config(train_file, max_tokens=1), tokenizer, seed=1).warm_start_batches(1, 1, seed=1))
    with pytest.raises(DataError, match="needs reference answers"):
        next(PromptSource(make_config(train_file, answer=None), tokenizer, seed=1).warm_start_batches(1, 1, seed=1))


def test_check_data_counts_and_names_the_fault(train_file: Path) -> None:
    good = DataConfig.parse({**make_config(train_file).model_dump(), "eval": []})
    summary = check_data(good)
    assert (summary.rows_per_epoch, summary.num_eval, summary.train[0].rows) == (12, 0, 12)
    with pytest.raises(DataError, match=r"addition.*no field 'q'"):
        check_data(make_config(train_file))
    lines = train_file.read_text().splitlines()
    train_file.write_text("\n".join([*lines[:9], "{", *lines[10:]]))
    with pytest.raises(DataError, match="line 10: not valid JSON"):
        check_data(good)


def test_files_that_did_not_change_are_read_once(train_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, opened = make_config(train_file), []
    config = config.model_copy(update={"eval": []})
    monkeypatch.setattr(check, "open_rows", lambda source: (opened.append(source), open_rows(source))[1])
    check_data(config)
    check_data(config)
    assert len(opened) == 2  # a file that was just written may be written again
    os.utime(train_file, (1e9, 1e9))
    first, second = check_data(config), check_data(config)
    assert (first, len(opened)) == (second, 3)
    train_file.write_text(train_file.read_text() * 2)
    os.utime(train_file, (1e9, 1e9))
    assert check_data(config).rows_per_epoch == 2 * first.rows_per_epoch


def test_checking_needs_no_ml_library() -> None:
    script = "import sys, penstock.shared.data.check as c; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)


BEGINS = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)])
STARTS = {
    "none": (None, []),
    "template": (BEGINS, [1]),
    "end": (processors.TemplateProcessing(single="$A <eos>", pair="$A $B", special_tokens=[("<eos>", 2)]), []),
    "roberta": (processors.RobertaProcessing(("<eos>", 2), ("<bos>", 1)), [1]),
    "several": (processors.Sequence([processors.ByteLevel(trim_offsets=False), BEGINS]), [1]),
}


@pytest.mark.parametrize(("processor", "start"), STARTS.values(), ids=STARTS)
async def test_a_prompt_begins_as_its_tokenizer_begins_a_text(
    tokenizer: Any, tmp_path: Path, processor: Any, start: list[int]
) -> None:
    """``add_bos`` in the job file overrides it. The dry run, which loads no tokenizer, notes the same rule."""
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if processor is not None:
        core.post_processor = processor
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>").save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)

    def ids(**config: Any) -> list[int]:
        return PromptBuilder(PromptConfig(template="{q}", answer=None, **config), saved).build({"q": "1"}).token_ids

    text = saved.encode("1", add_special_tokens=False)
    assert ids() == start + text
    assert (ids(add_bos=True), ids(add_bos=False)) == ([1, *text], text)
    spec: dict[str, Any] = {
        "name": "begins", "model": {"config": {}, "tokenizer": str(tmp_path)}, "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]}, "train": {"batch_size": 16, "max_updates": 1},
    }  # fmt: skip

    async def notes(**prompt: Any) -> tuple[str, ...]:
        config = JobConfig.parse({**spec, "data": {**spec["data"], "prompt": prompt}})
        return tuple((await plan_job(config, [], ServiceSettings(), stores_parts=True))["data"]["notes"])

    (note,) = await notes()
    assert note.startswith("data.prompt.add_bos: prompts begin with " + ("'<bos>', as" if start else "their text, as"))
    assert await notes(add_bos=False) == ()
