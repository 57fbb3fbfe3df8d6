"""The example notebook and the snippet of docs/python.md, executed as written."""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.shared.errors import ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
MANUAL = (ROOT / "docs/python.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _deployment(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables in which users give the address and the key of a deployment."""
    monkeypatch.setenv("PENSTOCK_URL", stack.stack.url)
    monkeypatch.setenv("PENSTOCK_API_KEY", "e2e-key")


def run_cell(source: str, names: dict[str, Any]) -> object:
    """Execute a cell; return the value of its last line, which a notebook displays."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.long
def test_the_example_notebook_runs() -> None:
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = [run_cell(cell, names) for cell in cells]
    job = names["job"]
    with job:
        assert names["record"].status.phase == "succeeded"
        assert (shown[0], shown[1]) == (job, job)
        html = job._repr_html_()
        assert "succeeded" in html
        assert 'aria-label="reward/mean from ' in html
        assert repr(job) == f"<Job {job.id} notebook: succeeded, update 20/20>"
        assert isinstance(shown[2], dict)
        assert set(shown[2]) == {"reward/mean", "policy/entropy"}
        assert isinstance(shown[3], list)
        assert len(shown[3]) == 3


class Cell:
    """Records the output of a notebook cell, in place of IPython's ``display``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pictures: list[str] = []
        shell, module = ModuleType("IPython"), ModuleType("IPython.display")
        shell.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
        module.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", shell)
        monkeypatch.setitem(sys.modules, "IPython.display", module)

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id, "what is updated needs an id"
        self.pictures.append(bundle.get("text/html", ""))
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.display(bundle, raw=raw, display_id=True)


@pytest.mark.long
def test_a_notebook_that_waits_shows_the_curve_live(stack: Any, make_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(monkeypatch)
    monkeypatch.setattr("penstock.job._LIVE_S", 0.1)
    with penstock.train(make_job("train.max_updates=30", name="live")) as job:
        assert job.wait().status.phase == "succeeded"
        threads = threading.enumerate()
        drawn = [text for text in cell.pictures if 'aria-label="reward/mean from ' in text]
        assert [text for text in drawn if "running" in text and "update 30/30" not in text], "before the end"
        assert cell.pictures[-1] == job._repr_html_(), "the end"
        assert not [one for one in threads if "keep_updating" in one.name]


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
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        metrics.to_pandas()
