"""Runs of a long benchmark, each written down as it finishes, so that an interrupted benchmark goes on where it was."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

__all__ = ["Finished", "digest", "run_all"]

Key = tuple[str, ...]


def digest(spec: dict[str, Any]) -> str:
    """Of what a job file says, comments not counted: part of the key of a run, so that a changed job runs again."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


class Finished:
    """Runs in a file of JSON lines, ``{"key": [...], "run": {...}}``. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.runs: dict[Key, dict[str, Any]] = {}
        if path is not None and path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            self.runs = {tuple(line["key"]): line["run"] for line in lines}

    def add(self, key: Key, run: dict[str, Any]) -> None:
        """Append one run; it is on disk when this returns."""
        self.runs[key] = run
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "run": run}) + "\n")

    def remove(self) -> None:
        """Forget the file: the benchmark is complete, the next one measures anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def run_all(work: Callable[[Key], dict[str, Any]], keys: Sequence[Key], finished: Finished, *, parallel: int) -> bool:
    """Run ``work`` in processes for every key that is not finished yet, ``parallel`` at once.

    A run that fails is reported on stderr and does not stop the others.

    Returns:
        Whether every run of ``keys`` is finished.
    """
    missing = [key for key in keys if key not in finished.runs]
    print(f"{len(keys) - len(missing)} of {len(keys)} runs are finished already", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(parallel, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(work, key): key for key in missing}
        for future in as_completed(pending):
            failure = future.exception()
            if failure is None:
                finished.add(pending[future], future.result())
            else:
                print(f"{' '.join(pending[future])} failed: {failure}", file=sys.stderr, flush=True)
    return all(key in finished.runs for key in keys)
