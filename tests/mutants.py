"""Run the listed mutants: change one line in a copy of the tree, run the tests that must fail, and report survivors.

    python tests/mutants.py [--only TEXT] [--jobs 2] [--share 0.95]

See `tests/mutants.yaml`. Exits with 1 if fewer than ``share`` of the mutants are killed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import yaml

from penstock.local.leash import leashed

__all__ = ["LIST", "ROOT", "Mutant", "read_mutants"]

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.yaml")
LONGEST_S = 600.0
"""Time limit of one test run; a mutant whose tests exceed it counts as killed."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest; every other status means that the tests could not run."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the code, and the tests that must fail with it."""

    number: int
    file: str
    find: str
    replace: str
    breaks: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number:3d} {self.file}: {self.breaks}"


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Return all mutants of ``path``, in the order of the file."""
    listed = yaml.safe_load(path.read_text())
    return [
        Mutant(
            number, each["file"], each["find"], each["replace"], each["breaks"],
            tuple(each.get("tests") or listed["tests"][each["file"]]),
        )
        for number, each in enumerate(listed["mutants"], 1)
    ]  # fmt: skip


@contextmanager
def copies(number: int) -> Iterator[Queue[Path]]:
    """Yield a queue of ``number`` copies of all files that git would commit; each serves one mutant at a time."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed_files = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed_files.stdout.decode().split("\0") if name]
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as directory:
        free: Queue[Path] = Queue()
        for index in range(number):
            copy = Path(directory) / str(index)
            for name in names:
                source, target = ROOT / name, copy / name
                if source.is_symlink() or source.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target, follow_symlinks=False)
            free.put(copy)
        yield free


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
    """Run the tests in a copy; return pytest's exit status, or None after the time limit, and the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}  # takes precedence over the installed tree
    process = subprocess.Popen(
        leashed(command), cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return None, ""
    return process.returncode, output


def killed_by(mutant: Mutant, free: Queue[Path]) -> str:
    """Return the first test that fails with a mutant, or '' if all pass. Raises RuntimeError if they could not run."""
    copy = free.get()
    try:
        file = copy / mutant.file
        before = file.read_text()
        file.write_text(before.replace(mutant.find, mutant.replace))
        try:
            status, output = run_tests(copy, mutant.tests)
        finally:
            file.write_text(before)
    finally:
        free.put(copy)
    if status not in (PASSED, FAILED, None):
        raise RuntimeError(f"{mutant}: the tests could not run:\n{_end_of(output)}")
    if status == PASSED:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[1] if failed else f"no end within {LONGEST_S:g} s" if status is None else _end_of(output)


def _end_of(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-3:])


def check_unchanged(free: Queue[Path], tests: tuple[str, ...]) -> None:
    """Check that the tests pass in an unchanged copy, since their failure would prove nothing. Raises RuntimeError."""
    copy = free.get()
    try:
        status, output = run_tests(copy, tests)
    finally:
        free.put(copy)
    if status != PASSED:
        raise RuntimeError(f"{' '.join(tests)}: they fail without a mutant:\n{_end_of(output)}")


def main() -> int:
    """Run the mutants that the command line selects; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants with this text in their file or description")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.95)
    given = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if given.only in str(mutant)]
    began, survived = time.monotonic(), list[Mutant]()
    with copies(given.jobs) as free, ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda tests: check_unchanged(free, tests), dict.fromkeys(mutant.tests for mutant in chosen)))
        for mutant, killer in zip(chosen, pool.map(lambda mutant: killed_by(mutant, free), chosen), strict=True):
            print(f"killed   {mutant}\n             by {killer}" if killer else f"SURVIVED {mutant}", flush=True)
            if not killer:
                survived.append(mutant)
    killed_share = 1 - len(survived) / max(1, len(chosen))
    seconds = time.monotonic() - began
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed ({killed_share:.0%}) in {seconds:.0f} s")
    return int(killed_share < given.share)


if __name__ == "__main__":
    sys.exit(main())
