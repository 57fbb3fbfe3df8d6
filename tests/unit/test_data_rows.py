"""Data sources: the rows of valid files, and the messages for invalid ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.shared.config.data import AdditionSource, CalculatorSource, FileSource, SortingSource
from penstock.shared.data.calculator import find_annotations, normalize
from penstock.shared.data.rows import open_rows
from penstock.shared.errors import ConfigError, DataError

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_lines_keeps_rows_and_limit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    rows = open_rows(FileSource(path=str(path)))
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.where(2) == f"{path}, line 3"
    assert len(open_rows(FileSource(path=str(path), limit=2))) == 2


def test_blank_lines_do_not_shift_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    rows = open_rows(FileSource(path=str(path)))
    assert len(rows) == 2
    assert rows.where(1).endswith("line 3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows"),
        ("\n \n", "holds no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', r"line 2: not valid JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n[1]\n', r"line 3: a row must be a JSON object, found list"),
        ('{"prompt": "\xff"}\n', r"line 1: not valid JSON"),
    ],
)
def test_bad_json_lines_name_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message) as caught:
        open_rows(FileSource(path=str(path)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"), [("none.jsonl", "no such file"), ("rows.csv", "unknown kind"), ("folder", "state.json")]
)
def test_wrong_paths_say_what_to_do(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message):
        open_rows(FileSource(path=str(tmp_path / name)))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    rows = open_rows(FileSource(path=str(path), limit=4))
    assert [rows[i] for i in range(len(rows))] == ROWS[:4]
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        open_rows(FileSource(path=str(path)))


def test_datasets_directory(tmp_path: Path) -> None:
    """Another process writes the directory with the library `datasets`, whose import is slow and warns."""
    script = (
        "import datasets, json, sys\n"
        "rows = datasets.Dataset.from_list(json.loads(sys.argv[1]))\n"
        "rows.save_to_disk(sys.argv[2] + '/one', num_shards=2)\n"
        "datasets.DatasetDict({'train': rows, 'test': rows}).save_to_disk(sys.argv[2] + '/both')\n"
    )
    subprocess.run([sys.executable, "-c", script, json.dumps(ROWS), str(tmp_path)], check=True, capture_output=True)
    rows = open_rows(FileSource(path=str(tmp_path / "one")))
    assert [rows[i] for i in range(len(rows))] == ROWS
    with pytest.raises(DataError, match=r"several splits \(train, test\)"):
        open_rows(FileSource(path=str(tmp_path / "both")))
    shard = next((tmp_path / "one").glob("*.arrow"))
    shard.write_bytes(b"torn")
    with pytest.raises(DataError, match="not a readable Arrow stream"):
        open_rows(FileSource(path=str(tmp_path / "one")))


def test_addition_is_a_pure_function_of_seed_and_index() -> None:
    source = AdditionSource(digits=2, num_rows=10)
    one, same, other = open_rows(source, seed=3), open_rows(source, seed=3), open_rows(source, seed=4)
    rows = [one[i] for i in range(200)]
    assert rows == [same[i] for i in range(200)]
    assert rows != [other[i] for i in range(200)]
    assert all(row["prompt"] == f"{row['a']}+{row['b']}=" and row["answer"] == str(row["a"] + row["b"]) for row in rows)
    assert max(row["a"] for row in rows) > 89
    assert min(row["b"] for row in rows) < 10


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("80,000 + $5", "80000+5"),
        (".50*4", "0.5*4"),
        ("1.00", "1"),
        ("007", "7"),
        ("10.20/2", "10.2/2"),
        ("100", "100"),
        ("0", "0"),
    ],
)
def test_calculator_normalizes(text: str, normal: str) -> None:
    assert normalize(text) == normal


def gsm8k(path: Path, *answers: str) -> str:
    return str(write_lines(path, [{"question": "?", "answer": answer} for answer in answers]))


def test_calculator_excludes_held_out_expressions_however_spelled(tmp_path: Path) -> None:
    train = gsm8k(
        tmp_path / "train.jsonl",
        "He has <<48/2=24>>24 and <<.5*4=2.00>>2.\n#### 2",
        "Again <<48/2=24.0>>24, <<1,000+1=1001>>1001, <<1+2+3+4+5+6+7+8+9+10+11=66>>66.",
        "Wrong once: <<7*7=49>>49 and <<7*7=48>>48. Broken: <<3+4>> <<=5>>",
    )
    test = gsm8k(tmp_path / "test.jsonl", "Here <<0.5*4=2>>2 and <<1000 + 1=1001>>1001 and <<1+1=2>>2.")
    rows = open_rows(CalculatorSource(path=train, exclude_path=test, max_chars=20))
    assert [rows[i] for i in range(len(rows))] == [{"prompt": "48/2=", "expression": "48/2", "answer": "24"}]
    held_out = {f"{expression}=" for expression, _ in find_annotations(Path(test))}
    assert not held_out & {rows[i]["prompt"] for i in range(len(rows))}
    assert [note.partition(": ")[2] for note in rows.notes] == [
        "2 expressions left out (excluded)",
        "1 expressions left out (too long)",
        "1 expressions left out (contradictory)",
    ]
    parts = [open_rows(CalculatorSource(path=train, limit=3)), open_rows(CalculatorSource(path=train, skip=3))]
    unfiltered = open_rows(CalculatorSource(path=train))
    assert [row for part in parts for row in map(part.__getitem__, range(len(part)))] == [
        unfiltered[i] for i in range(len(unfiltered))
    ]
    assert held_out & {unfiltered[i]["prompt"] for i in range(len(unfiltered))}


def test_a_calculator_source_without_expressions_is_refused(tmp_path: Path) -> None:
    path = gsm8k(tmp_path / "a.jsonl", "<<1+1=2>>2")
    with pytest.raises(DataError, match=r"no calculator expression remains.*1 expressions left out \(excluded\)"):
        open_rows(CalculatorSource(path=path, exclude_path=path))
    bad = write_lines(tmp_path / "b.jsonl", [{"answer": "<<1+1=2>>2"}, {"question": "?"}])
    with pytest.raises(DataError, match=r"line 2: no text field 'answer'; the row has: question"):
        open_rows(CalculatorSource(path=str(bad)))


def test_sorting_rows_are_ragged_repeatable_and_right() -> None:
    rows = open_rows(SortingSource(min_items=8, max_items=64), seed=3)
    again = open_rows(SortingSource(min_items=8, max_items=64), seed=3)
    for index in range(200):
        row = rows[index]
        assert row == again[index]
        assert row["prompt"][-1] == "="
        assert row["answer"] == "".join(sorted(row["prompt"][:-1]))
        assert len(set(row["answer"])) == row["items"]
    lengths = {rows[index]["items"] for index in range(2000)}
    assert lengths == set(range(8, 65))
    assert rows[0] != open_rows(SortingSource(), seed=4)[0]
    with pytest.raises(ConfigError, match="min_items 9 is larger than max_items 8"):
        SortingSource.parse({"min_items": 9, "max_items": 8})


def test_sorting_demonstrations_go_astray_in_the_stated_share() -> None:
    right = open_rows(SortingSource(min_items=8, max_items=32), seed=3)
    some = open_rows(SortingSource(min_items=8, max_items=32, astray=0.25), seed=3)
    all_rows = open_rows(SortingSource(min_items=64, max_items=64, astray=1.0), seed=3)
    assert [some[i]["prompt"] for i in range(400)] == [right[i]["prompt"] for i in range(400)]
    astray = [i for i in range(400) if some[i]["answer"] != right[i]["answer"]]
    assert 70 < len(astray) < 130
    assert len({len(some[i]["answer"]) - some[i]["items"] for i in astray}) > 20
    assert max(len(all_rows[i]["answer"]) for i in range(200)) == 63
    assert some[astray[0]] == open_rows(SortingSource(min_items=8, max_items=32, astray=0.25), seed=3)[astray[0]]


def test_sorting_demonstrations_ramble_in_the_stated_share() -> None:
    right = open_rows(SortingSource(min_items=8, max_items=32), seed=3)
    both = open_rows(SortingSource(min_items=8, max_items=32, astray=0.25, rambling=0.5), seed=3)
    astray = open_rows(SortingSource(min_items=8, max_items=32, astray=0.25), seed=3)
    changed = [i for i in range(400) if both[i]["answer"] != astray[i]["answer"]]
    assert 160 < len(changed) < 240
    for i in changed:
        assert both[i]["answer"] == "".join(sorted(both[i]["answer"], reverse=True))
        assert len(both[i]["answer"]) == 64
        assert astray[i] == right[i], "no row goes astray and rambles"
    with pytest.raises(ConfigError, match=r"astray \(0\.6\) and rambling \(0\.5\) are shares"):
        SortingSource.parse({"astray": 0.6, "rambling": 0.5})
