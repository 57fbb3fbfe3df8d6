"""Code that lies beside a job file: named by its content, uploaded, and imported under a private name."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest

from penstock.client import beside
from penstock.client.beside import MAX_CODE_BYTES, read_job
from penstock.client.files import upload_beside
from penstock.client.results import Code, File
from penstock.client.results.reading import one
from penstock.client.sending import complete
from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.problems import HttpProblem
from penstock.services.coordinator.user_code import check_uploaded
from penstock.services.reward.scorers.function import Function
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.rewards.scorers import FunctionScorer
from penstock.shared.data.rows import open_rows
from penstock.shared.errors import ConfigError, ScoringError

SOURCE = "def score(prompt, completion, answer, row, *, bonus=0.0):\n    return float(completion == answer) + bonus\n"
DIGEST = hashlib.sha256(SOURCE.encode()).hexdigest()
JOB = """
name: own
model: {config: {}, tokenizer: char}
data: {train: {type: addition}, eval: {type: file, path: ../rows.jsonl}}
reward: {scorers: [{type: function, path: "./reward.py:score"}]}
train: {batch_size: 16, max_updates: 5}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A job file with code beside it."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "reward.py").write_text(SOURCE)
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "data" / "files", max_bytes=1 << 20, max_files=10)


def test_a_job_file_names_its_code_by_content_and_its_data_from_its_folder(file: Path, tmp_path: Path) -> None:
    text = read_job(file, ["reward.scorers=[{type: function, path: reward.py:score, args: {bonus: 1}}]"])
    assert text.sources == {DIGEST: SOURCE}
    assert text.data["reward"]["scorers"][0] == {
        "type": "function", "path": f"reward@{DIGEST}:score", "args": {"bonus": 1},
    }  # fmt: skip
    assert text.data["data"]["eval"]["path"] == str(tmp_path / "rows.jsonl")
    assert parse_job(text.data).name == "own"


def test_small_data_beside_a_job_file_is_uploaded_once(
    file: Path, store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = file.parents[1] / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    bodies, keys = [], set()

    def send(call: Any) -> Any:
        if call.path == "/v1/files":
            bodies.append(call.body)
            keys.add(call.key)
            return one(File)(
                store.add(io.BytesIO(rows.read_bytes()), "rows.jsonl", "fine-tune", key=call.key).model_dump()
            )
        return one(Code)(store.add_code(SOURCE).model_dump())

    sent = [complete(upload_beside(read_job(file)), send) for _ in range(2)]
    assert sent[0] == sent[1]
    assert (len(keys), rows.read_bytes() in bodies[0]) == (1, True)
    (kept,) = store.list_all()
    assert sent[0].data["data"]["eval"] == {"type": "file", "path": kept.id}
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    rows.unlink()
    (source,) = parse_job(sent[0].data).data.eval
    assert open_rows(source)[0] == {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize("name", ["rows.parquet", "long.jsonl", "absolute.jsonl", "nothing.jsonl"])
def test_other_data_must_lie_where_the_services_see_it(file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(beside, "MAX_ROWS_BYTES", 100)
    path = file.parent / name
    if name != "nothing.jsonl":
        path.write_text("{}\n" * (40 if name == "long.jsonl" else 1))
    written = str(path) if name == "absolute.jsonl" else f"./{name}"
    text = read_job(file, [f"data.train={{type: file, path: '{written}'}}"])
    assert (text.rows, text.data["data"]["train"]["path"]) == (frozenset(), str(path))


@pytest.mark.parametrize(
    ("path", "flaw"),
    [("./nowhere.py:score", "cannot read .*nowhere.py: No such file"), ("./long.py:score", "more than 262144"),
     ("./a-b.py:score", "must be that of a module")],
)  # fmt: skip
def test_code_that_cannot_be_sent(file: Path, path: str, flaw: str) -> None:
    (file.parent / "long.py").write_text("#" * (MAX_CODE_BYTES + 1))
    (file.parent / "a-b.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=flaw):
        read_job(file, [f"reward.scorers=[{{type: function, path: '{path}'}}]"])


def test_code_is_kept_once_by_its_content(store: FileStore, tmp_path: Path) -> None:
    assert [store.add_code(SOURCE).sha256 for _ in range(2)] == [DIGEST, DIGEST]
    assert (tmp_path / "data" / "code" / f"{DIGEST}.py").read_text() == SOURCE
    with pytest.raises(HttpProblem, match="not Python, line 2"):
        store.add_code("x = 1\ndef score(:\n")
    assert store.list_all() == [], "it is no data set"
    assert store.add(io.BytesIO(b'{"a": 1}\n'), "rows.jsonl", "fine-tune").rows == 1


def test_a_job_whose_code_was_not_uploaded_is_refused(file: Path, store: FileStore, tmp_path: Path) -> None:
    spec = parse_job(read_job(file).data)
    with pytest.raises(ConfigError, match=r"reward\.scorers\[0\]\.path: reward\.py .* was not uploaded"):
        check_uploaded(spec, tmp_path / "data")
    store.add_code(SOURCE)
    check_uploaded(spec, tmp_path / "data")


def function(digest: str, name: str = "score", **args: Any) -> Function:
    return Function(FunctionScorer.model_validate({"path": f"reward@{digest}:{name}", "args": args}))


def test_uploaded_code_scores(store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    store.add_code(SOURCE)
    assert function(DIGEST, bonus=0.5).score("1+1=", "2", "2", {}) == 1.5
    with pytest.raises(ScoringError, match=r"cannot be called with .*: got an unexpected keyword argument 'bogus'"):
        function(DIGEST, bogus=1)
    with pytest.raises(ScoringError, match=r"'reward\.py:nothing' does not exist, or is None$"):
        function(DIGEST, "nothing")
    with pytest.raises(ScoringError, match=r"'reward\.py:scores' does not exist.*did you mean 'score'"):
        function(DIGEST, "scores")
    with pytest.raises(ScoringError, match=r"'reward\.py' cannot be read beside the reward service"):
        function("0" * 64)
    broken = store.add_code("import nothing_of_that_name\n").sha256
    for _ in range(2):  # what failed is not taken for imported
        with pytest.raises(ModuleNotFoundError):
            function(broken)
    (tmp_path / "data" / "code" / f"{'1' * 64}.py").write_text(SOURCE)
    with pytest.raises(ScoringError, match="SHA-256 differs"):
        function("1" * 64)
