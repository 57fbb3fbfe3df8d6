"""Code, data and models beside a job file are uploaded; services import the code under a name of its content."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from penstock.client import beside
from penstock.client.beside import MAX_CODE_BYTES, CodeFile, read_job, with_sources
from penstock.client.files import upload_beside
from penstock.client.results import Code, File
from penstock.client.results.reading import one
from penstock.client.sending import complete
from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.user_code import check_uploaded
from penstock.services.reward.scorers.function import Function
from penstock.shared.config.data import FileSource
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.rewards.graders import PythonGrader, parts_of
from penstock.shared.config.rewards.scorers import FunctionScorer, GraderScorer
from penstock.shared.data.rows import open_rows
from penstock.shared.errors import ConfigError, Invalid, NotFound, ScoringError

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
    """Write a job file with code beside it; return the path of the job file."""
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
    assert text.sources == {DIGEST: CodeFile("reward.py", SOURCE)}
    assert text.data["reward"]["scorers"][0] == {
        "type": "function", "path": f"reward@{DIGEST}:score", "args": {"bonus": 1},
    }  # fmt: skip
    assert text.data["data"]["eval"]["path"] == str(tmp_path / "rows.jsonl")
    assert parse_job(text.data).name == "own"


@pytest.mark.parametrize(
    ("section", "key"),
    [("model", "tokenizer"), ("algorithm", "teacher"), ("warm_start", "demonstrations"), ("model", "path")],
)
def test_paths_are_relative_to_the_job_file(file: Path, section: str, key: str) -> None:
    text = read_job(file, [f"{section}={{{key}: ../there}}"])
    assert text.data[section][key] == str(file.parents[1] / "there")


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


def test_small_parquet_is_uploaded_as_json_lines_if_json_has_its_types(
    file: Path, store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = file.parent / "rows.parquet"
    rows = [{"prompt": "1+1=", "answer": "2", "parts": [1, 1], "level": 0.5}, {"prompt": "2+2=", "answer": "4"}]

    def sent(*rows: dict[str, Any]) -> str:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), written)
        text = complete(upload_beside(read_job(file, ["data.eval={type: file, path: ./rows.parquet}"])), answer(store))
        return str(text.data["data"]["eval"]["path"])

    id = sent(*rows)
    assert (store.find(id).filename, store.find(id).rows) == ("rows.parquet.jsonl", 2)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    kept = open_rows(FileSource(path=id))
    assert [kept[0], kept[1]] == [rows[0], {**rows[1], "parts": None, "level": None}]
    for value in (b"raw", datetime(2026, 1, 1, tzinfo=UTC), Decimal("0.5"), math.nan, math.inf):
        assert sent({"prompt": "1+1=", "answer": value}) == str(written), "the services read it there"
    monkeypatch.setattr(beside, "MAX_UPLOAD_BYTES", written.stat().st_size)
    assert sent({"prompt": "0" * 1_000_000, "answer": "2"}) == str(written), "its lines are longer than the file"


def answer(store: FileStore) -> Callable[[Any], Any]:
    """Return a function that replies like a deployment that stores uploads in ``store``."""

    def send(call: Any) -> Any:
        if call.path == "/v1/files/code":
            return one(Code)(store.add_code(SOURCE).model_dump())
        kind = call.extra_headers["Content-Type"].partition("boundary=")[2].encode()
        purpose, content = (part.partition(b"\r\n\r\n") for part in call.body.split(b"--" + kind)[1:3])
        name = content[0].partition(b'filename="')[2].partition(b'"')[0].decode()
        record = store.add(
            io.BytesIO(content[2].removesuffix(b"\r\n")), name, purpose[2].strip().decode(), key=call.key
        )
        return one(File)(record.model_dump())

    return send


MODEL = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "tokenizer.json": b'{"a": 1}'}


@pytest.fixture
def model(file: Path) -> Path:
    """Write a model beside the job file; return its folder."""
    folder = file.parent / "base"
    folder.mkdir()
    for name, content in MODEL.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("Not part of the model.")
    (folder / ".gitattributes").write_text("")
    return folder


def test_a_small_model_beside_a_job_file_is_uploaded_once(file: Path, model: Path, store: FileStore) -> None:
    change = ["model={path: ./base, tokenizer: ./base}"]
    first, again = (complete(upload_beside(read_job(file, change)), answer(store)) for _ in range(2))
    id = first.data["model"]["path"]
    assert first.data["model"] == again.data["model"] == {"path": id, "tokenizer": id}
    kept = store.model(id)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == MODEL
    assert parse_job(first.data).model.path == id
    with pytest.raises(NotFound, match="is a model"):
        store.content(id)
    (model / "config.json").write_bytes(b'{"a": 2}')
    changed = complete(upload_beside(read_job(file, change)), answer(store)).data["model"]["path"]
    assert changed != id
    assert (kept / "config.json").read_bytes() == b"{}", "other jobs keep the old model"
    store.delete(changed)
    with pytest.raises(NotFound):
        store.model(changed)


def test_the_id_of_a_model_replaces_only_the_path_of_the_model(file: Path, model: Path) -> None:
    """Paths under other keys stay as they are: services read those models from the paths."""
    text = read_job(file, ["model={path: ./base}", f"algorithm={{type: distillation, teacher: '{model}'}}"])
    changed = text.with_uploads({str(model): "file-1"}).data
    assert (changed["model"]["path"], changed["algorithm"]["teacher"]) == ("file-1", str(model))


@pytest.mark.parametrize(
    "odd", ["long.safetensors", "modeling.py", "weights.bin", "shards/a.json", ".a.json", "", "absolute"]
)
def test_other_models_must_lie_where_the_services_see_them(
    file: Path, model: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(beside, "MAX_UPLOAD_BYTES", 1000)
    if not odd:
        (model / "config.json").unlink()
    elif odd != "absolute":
        (model / odd).parent.mkdir(exist_ok=True)
        (model / odd).write_bytes(bytes(1000 if odd.startswith("long") else 1))
    text = read_job(file, [f"model={{path: '{model if odd == 'absolute' else './base'}'}}"])
    assert (text.models, text.data["model"]["path"]) == (frozenset(), str(model))


@pytest.mark.parametrize(
    ("files", "flaw"),
    [
        ({"model.safetensors": b"a"}, "a model has a config.json"),
        ({"config.json": b"{}", "../config.json": b"{}"}, "'../config.json' is no file of a model"),
        ({"config.json": b"{}", "a/b.json": b"{}"}, "'a/b.json' is no file of a model"),
        ({"config.json": b"{}", "modeling.py": b""}, "'modeling.py' is no file of a model"),
        ({"config.json": b"{}", "model.bin": b""}, "'model.bin' is no file of a model"),
    ],
)
def test_an_archive_that_is_no_model_is_refused(store: FileStore, files: dict[str, bytes], flaw: str) -> None:
    with pytest.raises(Invalid, match=re.escape(flaw)):
        store.add(packed(files), "base.zip", "model")
    assert store.list_all() == []


def test_a_damaged_or_compressed_archive_is_refused(store: FileStore) -> None:
    whole = packed(MODEL).getvalue()
    for data in (whole.replace(bytes(range(256)), bytes(256)), whole[:-10], b"", b"{}\n"):
        with pytest.raises(Invalid, match="not a ZIP archive of a model"):
            store.add(io.BytesIO(data), "base.zip", "model")
    beyond = whole[:-6] + (len(whole) + 9).to_bytes(4, "little") + whole[-2:]  # where its directory begins
    with tempfile.TemporaryFile() as source:
        source.write(beyond)
        source.seek(0)
        with pytest.raises(Invalid, match="not a ZIP archive of a model"):
            store.add(source, "base.zip", "model")
    with pytest.raises(Invalid, match="at most 256 files"):
        store.add(packed(MODEL | {f"{n:0100}.json": b"" for n in range(1000)}), "base.zip", "model")
    with pytest.raises(Invalid, match="stored, not compressed"):
        store.add(packed(MODEL, zipfile.ZIP_DEFLATED), "base.zip", "model")
    assert store.list_all() == []


def packed(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return found


@pytest.mark.parametrize("name", ["rows.arrow", "long.jsonl", "absolute.jsonl", "nothing.jsonl"])
def test_other_data_must_lie_where_the_services_see_it(file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(beside, "MAX_UPLOAD_BYTES", 100)
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
def test_code_that_cannot_be_uploaded_is_refused(file: Path, path: str, flaw: str) -> None:
    (file.parent / "long.py").write_text("#" * (MAX_CODE_BYTES + 1))
    (file.parent / "a-b.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=flaw):
        read_job(file, [f"reward.scorers=[{{type: function, path: '{path}'}}]"])


def test_code_is_stored_once_by_its_content(store: FileStore, tmp_path: Path) -> None:
    assert [store.add_code(SOURCE).sha256 for _ in range(2)] == [DIGEST, DIGEST]
    assert (tmp_path / "data" / "code" / f"{DIGEST}.py").read_text() == SOURCE
    with pytest.raises(Invalid, match="not Python, line 2"):
        store.add_code("x = 1\ndef score(:\n")
    assert store.list_all() == [], "code is not listed as a data set"
    assert store.add(io.BytesIO(b'{"a": 1}\n'), "rows.jsonl", "fine-tune").rows == 1


def test_a_job_whose_code_was_not_uploaded_is_refused(file: Path, store: FileStore, tmp_path: Path) -> None:
    spec = parse_job(read_job(file).data)
    with pytest.raises(ConfigError, match=r"reward\.scorers\[0\]\.path: reward\.py .* was not uploaded"):
        check_uploaded(spec, tmp_path / "data")
    store.add_code(SOURCE)
    check_uploaded(spec, tmp_path / "data")


def function(digest: str, name: str = "score", **args: Any) -> Function:
    return Function(FunctionScorer.model_validate({"path": f"reward@{digest}:{name}", "args": args}))


GRADE = "def grade(sample, item):\n    return float(sample['output_text'] == item['answer'])\n"
GRADE_DIGEST = hashlib.sha256(GRADE.encode()).hexdigest()
GRADER = {"type": "python", "name": "right", "path": "./grade.py"}
SEVERAL = {"type": "multi", "name": "both", "calculate_output": "right / 2", "graders": {"right": GRADER}}


@pytest.mark.parametrize("grader", [GRADER, {**GRADER, "path": "./grade.py:grade"}, SEVERAL])
def test_a_job_file_names_the_file_of_a_grader_by_content(file: Path, grader: dict[str, Any], tmp_path: Path) -> None:
    (file.parent / "grade.py").write_text(GRADE)
    text = read_job(file, [f"reward.scorers=[{{type: grader, grader: {json.dumps(grader)}}}]"])
    assert [code.source for code in text.sources.values()] == [GRADE]
    spec = parse_job(text.data)
    (part,) = parts_of(spec.reward.scorers[0].grader).values()
    assert (part.path, part.source) == (f"grade@{GRADE_DIGEST}:grade", None)
    with pytest.raises(ConfigError, match=r"grade\.py .* was not uploaded"):
        check_uploaded(spec, tmp_path / "data")
    inline = GraderScorer.model_validate({"grader": with_sources(grader, file.parent)}).grader
    assert parts_of(inline)["right"] == PythonGrader(name="right", source=GRADE), "`penstock grade` sends the source"


@pytest.mark.parametrize("env", ["{}", "{taskset: {level: 2}}", "{taskset: {id: word-game, level: 2}}"])
def test_a_job_file_names_the_file_of_a_taskset_by_content(file: Path, env: str, tmp_path: Path) -> None:
    source = "import verifiers.v1 as vf\n"
    (file.parent / "word_game.py").write_text(source)
    changes = [f"environment={{type: verifiers, path: ./word_game.py, env: {env}, max_turns: 1}}", "data.eval=[]"]
    tasks = ["data.train={type: tasks, num_rows: 4}", "reward.scorers=[{type: environment}]"]
    text = read_job(file, [*changes, *tasks])
    assert [code.source for code in text.sources.values()] == [source]
    spec = parse_job(text.data)
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert spec.environment.path == f"word_game@{digest}"
    assert spec.environment.complete["taskset"]["id"].replace("-", "_") == "word_game"
    assert spec.environment.complete["taskset"].get("level", 2) == 2
    with pytest.raises(ConfigError, match=r"environment\.path: word_game\.py .* was not uploaded"):
        check_uploaded(spec, tmp_path / "data")


def test_a_broken_file_beside_a_job_file_is_named(file: Path, store: FileStore) -> None:
    def send(call: Any) -> Any:
        try:
            return one(Code)(store.add_code(json.loads(call.body)["source"]).model_dump())
        except Invalid as error:
            raise ConfigError(f"file is not valid:\n  source: {error}") from None

    (file.parent / "reward.py").write_text("\ndef score(:\n")
    with pytest.raises(ConfigError, match=r"^\./reward\.py: not Python, line 2: "):
        complete(upload_beside(read_job(file, ["data.eval=[]"])), send)
    changed = [f"reward.scorers=[{{type: grader, grader: {json.dumps(GRADER)}}}]"]
    with pytest.raises(ConfigError, match=r"'\./grade\.py': cannot read .*/jobs/grade\.py: No such file or directory"):
        read_job(file, changed)


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
    for _ in range(2):  # a failed import does not count as imported
        with pytest.raises(ModuleNotFoundError):
            function(broken)
    (tmp_path / "data" / "code" / f"{'1' * 64}.py").write_text(SOURCE)
    with pytest.raises(ScoringError, match="SHA-256 differs"):
        function("1" * 64)
