"""The example of docs/rewards.md, executed as written: a function beside the job file, tried and trained with."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml

from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.model import ModelConfig
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol.events import JobStarted
from penstock.shared.protocol.jobs import JobRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

MANUAL = Path(__file__).resolve().parents[2] / "docs/rewards.md"
EXAMPLES = MANUAL.parents[1] / "examples"
SECTION = MANUAL.read_text(encoding="utf-8").partition("## A function of yours\n")[2].partition("\n## ")[0]


def block(language: str) -> str:
    """Return the code block of the section in one language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTION, flags=re.DOTALL)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the files of the section."""
    (tmp_path / "reward.py").write_text(block("python"))
    (tmp_path / "job.yaml").write_text(block("yaml"))
    return tmp_path


@pytest.mark.long
def test_the_example_of_the_manual_runs(stack: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    dry, submit = (shlex.split(line) for line in block("bash").splitlines())
    plan = stack.cli(*dry[1:])
    assert (plan.exit_code, "warning" in plan.output) == (0, False), plan.output
    assert "4 groups x 4 = 16 trajectories, at most 20 times" in plan.output
    result = stack.cli(*submit[1:])
    assert result.exit_code == 0, result.output
    record = stack.client.find("own-reward")
    (scorer,) = record.spec["reward"]["scorers"]
    assert re.fullmatch(r"reward@[0-9a-f]{64}:score", scorer["path"])
    parts = {name for name in stack.client.metrics(record.id)["series"] if name.startswith("reward/part/")}
    assert parts == {"reward/part/digits"}
    assert "no_signal" not in [warning.kind for warning in record.status.warnings]


def test_data_beside_the_job_file_is_trained(stack: Any, folder: Path) -> None:
    (folder / "sums.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(8)))
    sums = ("--set", "data.train={type: file, path: ./sums.jsonl}")
    result = stack.cli("submit", str(folder / "job.yaml"), "--follow", "--set", "train.max_updates=3", *sums)
    assert result.exit_code == 0, result.output
    (source,) = stack.client.find("own-reward").spec["data"]["train"]
    (upload,) = [file for file in stack.client.files.list() if file.filename == "sums.jsonl"]
    assert (source["path"], upload.rows) == (upload.id, 8)
    check_digest(stack, stack.client.find("own-reward"))
    (folder / "sums.jsonl").write_text('{"prompt": 1, "answ\n')
    refused = stack.cli("submit", str(folder / "job.yaml"), "--dry-run", *sums)
    assert (refused.exit_code, "line 1" in refused.output) == (2, True), refused.output


def check_digest(stack: Any, record: JobRecord) -> None:
    """Check that the ledger pins the code: the digest covers the job file, which names the code by its SHA-256."""
    (pinned,) = [event.config_digest for event in stack.ledger(record.id) if isinstance(event, JobStarted)]
    spec = record.spec
    assert pinned == xxhash.xxh3_64_hexdigest(parse_job(spec).model_dump_json().encode())
    path = re.sub("@[0-9a-f]{64}:", f"@{'0' * 64}:", spec["reward"]["scorers"][0]["path"])
    other = {**spec, "reward": {**spec["reward"], "scorers": [{**spec["reward"]["scorers"][0], "path": path}]}}
    assert pinned != xxhash.xxh3_64_hexdigest(parse_job(other).model_dump_json().encode())


@pytest.mark.long
def test_a_dry_run_finds_code_that_cannot_be_used(stack: Any, folder: Path) -> None:
    file, code = folder / "job.yaml", folder / "reward.py"

    def dry_run(*words: str) -> Any:
        return stack.cli("submit", str(file), "--dry-run", *words)

    code.write_text("import nothing_of_that_name\n")
    refused = dry_run()
    assert refused.exit_code == 2, refused.output
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name' (reward.py, line 1)" in refused.output
    code.write_text("def score(prompt):\n    return 0.0\n")
    refused = dry_run()
    assert refused.exit_code == 2, refused.output
    assert "cannot be called with (prompt, completion, answer, row, **args)" in refused.output
    code.write_text("def score(prompt, completion, answer, row, bonus):\n    return row['no']\n")
    warned = dry_run("--json")
    assert warned.exit_code == 0, warned.output
    (warning,) = json.loads(warned.stdout)["warnings"]
    assert "tried on the first row" in warning
    assert "KeyError: 'no' (reward.py, line 2)" in warning
    missing = dry_run("--set", "reward.scorers=[{type: function, path: 'no.such.module:score'}]")
    assert missing.exit_code == 2, missing.output
    assert "No module named 'no'" in missing.output


CODE = """
import re

def count(word, letter):
    return str(word.count(letter))

def rank(row):
    return float(row["answer"])

class Shelf:
    def __init__(self, seed, row):
        self.wanted = row["answer"]

    def look(self):
        return self.wanted

    def reward(self, answer):
        return float(answer == self.wanted)

def grade(sample, item):
    return float(sample["output_text"] == item["answer"])
"""
TOOLS = """
environment:
  max_turns: 2
  max_observation_tokens: 16
  calls: {begin: "<", end: ">", parallel: false}
  tools:
    - {type: function, name: count, path: "./code.py:count", description: Counts a letter., parameters: {
        type: object, properties: {word: {type: string}, letter: {type: string}}, required: [word, letter]}}
    - {type: method, name: look, path: "./code.py:Shelf", description: Looks at the shelf.}
reward:
  scorers:
    - {type: environment}
    - {type: grader, name: graded, grader: {type: python, name: graded, source: "SOURCE"}}
"""


@pytest.mark.long
def test_a_dry_run_tries_all_code_of_a_job(stack: Any, folder: Path) -> None:
    """Each service imports and calls the code that it would run; the dry run names file and line of mistakes."""
    file, code = folder / "job.yaml", folder / "code.py"
    plain, _, rest = (folder / "job.yaml").read_text().partition("reward:\n")
    rest = "algorithm:" + rest.partition("algorithm:")[2]
    source = CODE[CODE.index("def grade") :]

    def dry_run(changed: str = "", into: str = "", grade: str = source) -> Any:
        assert changed in CODE + source
        code.write_text(CODE.replace(changed, into) if changed else CODE)
        file.write_text(plain + TOOLS.replace('"SOURCE"', json.dumps(grade)) + rest)
        words = ("--set", "data.curriculum=./code.py:rank", "--set", "sampling.max_new_tokens=16")
        return stack.cli("submit", str(file), "--dry-run", "--json", *words)

    good = dry_run()
    assert good.exit_code == 0, good.output
    assert not [text for text in json.loads(good.stdout)["warnings"] if "raised" in text or "tried" in text], (
        good.output
    )
    refused = dry_run("import re", "import nothing_of_that_name")
    assert refused.exit_code == 2, refused.output
    for key in ("environment.tools[0] (count)", "environment.tools[1] (look)", "data.curriculum"):
        assert f"{key}: importing code.py:" in refused.output
    assert "No module named 'nothing_of_that_name' (code.py, line 2)" in refused.output
    assert "; install what has 'nothing_of_that_name' beside the env service" in refused.output
    for changed, into, message in [
        ("count(word, letter)", "count(word)", "environment.tools[0] (count): tool function"),
        ("__init__(self, seed, row)", "__init__(self, row)", "environment.tools[1] (look): the class"),
        ("reward(self, answer)", "reward(self)", "environment: the method 'reward'"),
        ("rank(row)", "rank()", "data.curriculum: 'code.py:rank'"),
    ]:
        refused = dry_run(changed, into)
        assert (refused.exit_code, message in refused.output) == (2, True), refused.output
        assert "cannot be called with" in refused.output
    refused = dry_run(grade="def grading(sample, item):\n    return 1.0\n")
    assert (refused.exit_code, "defines no function grade" in refused.output) == (2, True), refused.output
    for changed, into, message in [
        ("word.count(letter)", "{}[word]", "raised KeyError: 'text' (code.py, line 5)"),
        ('float(row["answer"])', 'row["level"]', "raised KeyError: 'level' (code.py, line 8)"),
        (
            "answer == self.wanted",
            "self.shelf",
            "reward(<the reference answer of the first row>) raised AttributeError",
        ),
    ]:
        warned = dry_run(changed, into)
        assert warned.exit_code == 0, warned.output
        (warning,) = [text for text in json.loads(warned.stdout)["warnings"] if "raised" in text]
        assert message in warning
    warned = dry_run(grade=source.replace("return", "import nothing_of_that_name\n    return"))
    assert warned.exit_code == 0, warned.output
    assert "grade() raised ModuleNotFoundError: No module named 'nothing_of_that_name'" in warned.output


GRADED = """
reward:
  scorers:
    - {type: grader, grader: {type: python, name: graded, path: ./grade.py}}
"""


@pytest.mark.long
def test_a_grader_beside_the_job_file_is_tried_uploaded_and_trained_with(stack: Any, folder: Path) -> None:
    """Random digits are graded by the file; the job names the file by its content."""
    file, code, source = folder / "job.yaml", folder / "grade.py", CODE[CODE.index("def grade") :]
    plain, _, rest = file.read_text().partition("reward:\n")
    file.write_text(plain + GRADED + "algorithm:" + rest.partition("algorithm:")[2])

    def dry_run() -> Any:
        return stack.cli("submit", str(file), "--dry-run", "--json")

    missing = dry_run()
    assert (missing.exit_code, "'./grade.py': cannot read" in missing.output) == (2, True), missing.output
    for changed, into, message in [
        ("def grade(sample", "\ndef grade(sample:", "./grade.py: not Python, line 2: "),
        ("def grade", "def grading", "reward.scorers[0] (graded): grade.py defines no function grade(sample, item)"),
        ("sample, item", "sample", "grade() in line 1 of grade.py cannot be called with (sample, item)"),
    ]:
        code.write_text(source.replace(changed, into))
        refused = dry_run()
        assert (refused.exit_code, message in " ".join(refused.output.split())) == (2, True), refused.output
    code.write_text(source.replace("answer", "level"))
    warned = dry_run()
    assert (warned.exit_code, "grade() raised KeyError: 'level'" in warned.output) == (0, True), warned.output
    code.write_text(source)
    result = stack.cli("submit", str(file), "--follow", "--set", "train.max_updates=3")
    assert result.exit_code == 0, result.output
    record = stack.client.find("own-reward")
    path = record.spec["reward"]["scorers"][0]["grader"]["path"]
    assert path == f"grade@{hashlib.sha256(source.encode()).hexdigest()}:grade"
    (pinned,) = [event.config_digest for event in stack.ledger(record.id) if isinstance(event, JobStarted)]
    assert pinned == xxhash.xxh3_64_hexdigest(parse_job(record.spec).model_dump_json().encode())
    groups = stack.groups(record.id).values()
    assert not any(group.failed.any() for group in groups)
    assert {float(reward) for group in groups for reward in group.rewards} == {0.0, 1.0}
    (folder / "grader.yaml").write_text("{type: python, name: graded, path: ./grade.py}")
    tried = stack.cli("grade", str(folder / "grader.yaml"), "--sample", "2", "--item", '{"answer": "2"}')
    assert (tried.exit_code, tried.output.strip()) == (0, "1"), tried.output


SHELF = """
class Shelf:
    def __init__(self, seed, row):
        self.asked = 0

    def look(self, text):
        self.asked += 1
        return f"{len(text)}{self.asked}%"

    def reward(self, answer):
        return float(self.asked)
"""
SHELF_JOB = (
    "name=shelf", "model.characters=0123456789+=<>%", "model.config.max_position_embeddings=64",
    "sampling.max_new_tokens=16", "limits.byte_budget=33554432", "train.max_updates=4", "train.batch_size=32",
)  # fmt: skip
LOOK = {
    "type": "method", "name": "look", "path": "./code.py:Shelf", "description": "Looks at the shelf.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}  # fmt: skip
WINDOW = {
    "max_turns": 2, "max_observation_tokens": 8, "tools": [LOOK],
    "calls": {"begin": "<", "end": ">", "body": "text", "parallel": False},
}  # fmt: skip


@pytest.mark.long
def test_an_uploaded_tool_is_called_while_a_job_trains(stack: Any, make_job: Any, tmp_path: Path) -> None:
    """Random text contains calls. The class answers with the length of a call, and rewards that it was asked."""
    (tmp_path / "code.py").write_text(SHELF)
    spec = make_job(*SHELF_JOB, environment=WINDOW, reward={"scorers": [{"type": "environment"}]})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    result = stack.cli("submit", str(tmp_path / "job.yaml"), "--follow")
    assert result.exit_code == 0, result.output
    record = stack.client.find("shelf")
    assert (record.status.phase, record.status.step) == ("succeeded", 4)
    (tool,) = record.spec["environment"]["tools"]
    assert re.fullmatch(r"code@[0-9a-f]{64}:Shelf", tool["path"])
    tokenizer = build_tokenizer(ModelConfig.model_validate(record.spec["model"]))
    calls = 0
    for group in stack.groups(record.id).values():
        assert not group.failed.any()
        for start, end, reward in zip(group.cu_seqlens, group.cu_seqlens[1:], group.rewards, strict=False):
            ids, observed = group.token_ids[start:end], np.flatnonzero(group.mask[start:end] == 0)
            assert reward == bool(len(observed)), "as often as it was asked"
            if len(observed):
                call = tokenizer.decode(ids[: observed[0]]).partition("<")[2].removesuffix(">")
                assert tokenizer.decode(ids[observed]) == f"{len(call)}1%"
                calls += 1
    assert calls > 0
    stack.check_audit(record.id)


@pytest.mark.long
def test_a_dry_run_imports_an_engine_and_does_not_open_it(stack: Any) -> None:
    def dry_run(*words: str) -> Any:
        return stack.cli("submit", str(EXAMPLES / "own-engine.yaml"), "--dry-run", "--json", *words)

    good = dry_run()
    assert good.exit_code == 0, good.output
    assert "raised" not in good.output
    refused = dry_run("--set", "rollout.path=no_such_module:Engine")
    assert (refused.exit_code, "rollout.path: " in refused.output) == (2, True), refused.output
    assert "No module named 'no_such_module'" in refused.output


@pytest.mark.long
def test_a_custom_engine_trains_a_job(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job of docs/how-to/engine.md, executed as written."""
    monkeypatch.chdir(EXAMPLES.parent)
    page = (MANUAL.parent / "how-to/engine.md").read_text()
    (commands,) = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    for line in commands.splitlines():
        result = stack.cli(*shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
    job = stack.client.find("own-engine")
    assert re.fullmatch(r"own_engine@[0-9a-f]{64}:TransformersEngine", job.spec["rollout"]["path"])
    mismatch = stack.client.metrics(job.id, names="mismatch/logprob")["series"]["mismatch/logprob"]
    assert max(value for value in mismatch if value is not None) < 1e-4
    versions = {int(row[1]) for group in stack.groups(job.id).values() for row in group.spans}
    assert len(versions) > 1, "it followed the versions"
    stack.check_audit(job.id)


@pytest.mark.long
def test_a_job_says_why_its_engine_cannot_be_opened(stack: Any) -> None:
    for change, message in [
        ("rollout.options={atention: eager}", "atention: unknown key; did you mean 'attention'?"),
        ("rollout.path=no_such_module:Engine", "No module named 'no_such_module'"),
    ]:
        result = stack.cli("submit", str(EXAMPLES / "own-engine.yaml"), "--set", change)
        assert result.exit_code == 0, result.output
        job = stack.client.find("own-engine").id
        stack.until(partial(is_reason, stack, job, message), "the reason", 60, partial(stack.client.why, job))
        stack.client.cancel(job, checkpoint=False)
        stack.finish(job)


@pytest.mark.long
def test_a_job_says_why_its_engine_does_not_start(stack: Any, tmp_path: Path) -> None:
    """``why`` and the events name the reason, and the job continues once the engine starts."""
    message, full = "there is no room for the engine", tmp_path / "full"
    full.touch()
    begin = "    async def _open(self) -> None:\n"
    check = f"        if Path({str(full)!r}).exists():\n            raise Unavailable({message!r})\n"
    source = (EXAMPLES / "own_engine.py").read_text()
    assert source.count(begin) == 1
    imports = "\nfrom pathlib import Path\nfrom penstock.shared.errors import Unavailable\n"
    (tmp_path / "own_engine.py").write_text(source.replace(begin, begin + check) + imports)
    (tmp_path / "own-engine.yaml").write_text((EXAMPLES / "own-engine.yaml").read_text())
    result = stack.cli("submit", str(tmp_path / "own-engine.yaml"))
    assert result.exit_code == 0, result.output
    job = stack.client.find("own-engine").id
    stack.until(partial(is_reason, stack, job, message), "the reason", 60, partial(stack.client.why, job))

    def warned() -> bool:
        found = [row for row in stack.client.events(job, follow=False) if row["type"] == "worker_problem"]
        expected = [("warning", f"rollout worker 'rollout-0': {message}")]
        return [(row["level"], row["message"]) for row in found] == expected

    stack.until(warned, "one event", 60, lambda: list(stack.client.events(job, follow=False)))
    full.unlink()
    assert stack.finish(job).status.phase == "succeeded"


def is_reason(stack: Any, job: str, message: str) -> bool:
    return any(message in str(row) for row in stack.client.why(job))
