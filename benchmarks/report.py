"""Output of every benchmark beside its numbers: the machine, a table, the targets it checks, and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "machine"]


def machine() -> dict[str, Any]:
    """CPU model, cores, memory, kernel, Python and the load average right now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * size / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


@dataclass
class Report:
    """Collects rows and checks; ``finish`` prints them and sets the exit status."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=machine)

    def row(self, *cells: str) -> None:
        """Add a row of text."""
        self.rows.append(list(cells))

    def check(self, text: str, holds: bool) -> None:
        """A target and whether this run met it."""
        self.checks[text] = holds

    def finish(self, out: Path | None) -> int:
        """Print the table, write JSON to ``out``, return 1 if a target was missed."""
        ended = os.getloadavg()[0]
        facts = self.started
        print(self.title)
        print(f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux {facts['kernel']}, ", end="")
        print(f"Python {facts['python']}, load {facts['load'][0]} before and {ended:.2f} after\n")
        table = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        for number, row in enumerate(table):
            print(
                "  ".join(
                    cell.ljust(w) if i == 0 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                )
            )
            if number == 0:
                print("  ".join("-" * width for width in widths))
        print()
        for text, holds in self.checks.items():
            print(f"{'met   ' if holds else 'MISSED'}  {text}")
        self.write(out)
        sys.stdout.flush()
        return 0 if all(self.checks.values()) else 1

    def write(self, out: Path | None) -> None:
        """Write the results so far as JSON to ``out``; a long benchmark calls it after each part."""
        if out is None:
            return
        content = {
            "title": self.title,
            "machine": self.started,
            "load_after": os.getloadavg()[0],
            "results": self.results,
            "checks": self.checks,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=2) + "\n")
