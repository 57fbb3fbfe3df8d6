"""The example notebook and the snippet of docs/python.md, executed as written."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

import penstock
from penstock.shared.errors import ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
THREADS = "threading.enumerate() if 'keep_updating' in one.name"
MANUAL = (ROOT / "docs/python.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _deployment(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables in which users give the address and the key of a deployment."""
    monkeypatch.setenv("PENSTOCK_URL", stack.stack.url)
    monkeypatch.setenv("PENSTOCK_API_KEY", "e2e-key")


class Reader(NotebookClient):
    """Executes a notebook in a kernel of Jupyter; records each state of the display that a cell updates."""

    def __init__(self, notebook: NotebookNode, **options: Any) -> None:
        super().__init__(notebook, **options)
        self.drawn: list[str] = []

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        if msg["msg_type"] == "update_display_data":
            self.drawn.append(msg["content"]["data"].get("text/html", ""))
        return super().process_message(msg, cell, cell_index)


def value_of(cell: NotebookNode, kind: str) -> str:
    """Return the value of a cell's last line, as the notebook displays it."""
    (result,) = [output for output in cell.outputs if output.output_type == "execute_result"]
    return str(result.data[kind])


@pytest.mark.long
def test_the_example_notebook_runs(stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of Jupyter executes the cells; a first one makes the display quicker, a last one lists the threads."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))  # no kernels, settings and files of the user
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    notebook.cells.insert(0, new_code_cell("import penstock.job\npenstock.job._LIVE_S = 0.1"))
    notebook.cells.append(new_code_cell(f"import threading\n[one.name for one in {THREADS}]"))
    reader = Reader(notebook, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(reader.async_execute())
    _, submitted, waited, numbers, samples, threads = [one for one in notebook.cells if one.cell_type == "code"]
    kinds = [[output.output_type for output in cell.outputs] for cell in (submitted, waited, numbers, samples, threads)]
    result = ["execute_result"]
    assert kinds == [result, ["display_data", *result], result, result, result], "nothing else: no error, no warning"

    with penstock.Job("notebook") as job:
        assert value_of(submitted, "text/plain").startswith(f"<Job {job.id} notebook: ")
        assert f"<b>notebook</b> <code>{job.id}</code>" in value_of(submitted, "text/html")
        live = [text for text in reader.drawn if "running" in text and "update 20/20" not in text]
        assert [text for text in live if 'aria-label="reward/mean from ' in text], "the curve, before the end"
        at_the_end = job._repr_html_()
        assert "succeeded" in at_the_end
        assert 'aria-label="reward/mean from ' in at_the_end
        assert reader.drawn[-1] == waited.outputs[0].data["text/html"] == value_of(waited, "text/html") == at_the_end
        assert value_of(waited, "text/plain") == repr(job) == f"<Job {job.id} notebook: succeeded, update 20/20>"
        series = job.metrics("reward/mean", "policy/entropy").series
        shown = ast.literal_eval(value_of(numbers, "text/plain"))
        assert shown == {name: (values[0], values[-1]) for name, values in series.items()}
        assert shown.keys() == {"reward/mean", "policy/entropy"}
        newest = [(one.prompt, one.completion, one.reward) for one in job.samples(limit=3)]
        assert ast.literal_eval(value_of(samples, "text/plain")) == newest
        assert len(newest) == 3
    assert value_of(threads, "text/plain") == "[]", "the display has ended"


def test_the_snippet_of_the_manual_runs(make_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = MANUAL.partition("## In a script or a notebook\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(json.dumps(make_job(name="scripted")))
    names: dict[str, Any] = {}
    exec(code, names)
    with names["job"] as job:
        assert names["record"].status.phase == "succeeded"
        assert penstock.Job("scripted", job.client).id == job.id
        metrics = job.metrics("reward/mean", "policy/entropy")
        frame = metrics.to_pandas()
        assert (set(frame.columns), frame.index.name) == ({"reward/mean", "policy/entropy"}, "step")
        assert list(frame.index) == metrics.steps == list(range(1, names["record"].status.step + 1))
        assert list(frame["reward/mean"]) == metrics.series["reward/mean"]


def test_a_frame_needs_pandas_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.job import Metrics

    metrics = Metrics([1, 2], [0.0, 1.0], {"reward/mean": [0.5, None]})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        metrics.to_pandas()
