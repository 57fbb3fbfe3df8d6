"""Print what an image installs for the extras named on the command line: pins with hashes, taken from the lock file.

`extras.txt` names what each extra needs, dependencies of dependencies included; `requirements.lock` pins them. An extra
that the lock file does not cover has no line in `extras.txt`: its requirements are printed as pyproject.toml has them,
behind a plus sign, for `install.sh`. `--write UV` writes both files anew.

Images install these before the source is copied, so that a change of code rebuilds nothing but the last layer.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

__all__ = ["BUILD", "CORE", "closures", "locked", "pins", "requirements", "unlocked"]

DEPLOY = Path(__file__).resolve().parent
PYPROJECT, LOCK, EXTRAS = DEPLOY.parent / "pyproject.toml", DEPLOY / "requirements.lock", DEPLOY / "extras.txt"
CORE, BUILD = "core", "build"
"""Lines of `extras.txt` that are no extras: the package without any, and what builds its wheel."""
TORCH = "# torch, whose wheels have other hashes on each index"
CUDA = ("nvidia-", "cuda-", "triton")
"""Packages so named come with a CUDA build of torch, and only with it."""
COMPILE = [
    "--universal",
    "--python-version",
    "3.11",
    "--no-emit-package",
    "torch",
    "--no-header",
    "--no-annotate",
    "-q",
]


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements of ``project`` (the pyproject table) with ``extras``, without duplicates, in order.

    Raises:
        KeyError: an extra does not exist.
    """
    name, optional = str(project["name"]), project["optional-dependencies"]
    assert isinstance(optional, dict)
    found: dict[str, None] = {}
    queue = [*_texts(project["dependencies"]), *(line for extra in extras for line in _texts(optional[extra]))]
    while queue:
        line = queue.pop(0)
        own = re.fullmatch(rf"{re.escape(name)}\[([^]]+)]", line)
        if own:
            queue += [text for extra in own[1].split(",") for text in _texts(optional[extra.strip()])]
        else:
            found[line] = None
    return list(found)


def closures() -> dict[str, set[str]]:
    """By extra: names of all the packages that it needs, as they are written in the lock file."""
    lines = (line.split(":", 1) for line in EXTRAS.read_text(encoding="utf-8").splitlines())
    return {extra: set(names.split()) for extra, names in lines}


def pins() -> dict[str, list[str]]:
    """Entries of the lock file by name: several where the version depends on that of Python."""
    found: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", LOCK.read_text(encoding="utf-8").strip()):
        found.setdefault(_name(entry), []).append(entry)
    return found


def locked(extras: list[str]) -> list[str]:
    """Entries of the lock file for the package with ``extras``, those left out that the lock does not cover."""
    known, entries = closures(), pins()
    needed = set[str]().union(*(known[extra] for extra in extras if extra in known))
    head = [TORCH] if "torch" in needed else []
    return head + [entry for name in sorted(needed - {"torch"}) for entry in entries[name]]


def unlocked(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements of those of ``extras`` that the lock does not cover.

    Raises:
        KeyError: an extra does not exist.
    """
    known, covered = closures(), requirements(project, [])
    loose = requirements(project, [extra for extra in extras if extra not in known])
    return [line for line in loose if line not in covered]


def write(project: dict[str, object], build: list[str], uv: str) -> None:
    """Resolve anew with ``uv``: what continuous integration installs, and which part of that each extra needs."""
    command = [uv, "pip", "compile", *COMPILE]
    everything = ["--extra", "dev", "--extra", "docs", "--generate-hashes", "-o", str(LOCK)]
    subprocess.run([*command, str(PYPROJECT), *everything], check=True, stdout=subprocess.DEVNULL)
    kept = [entry for name, entries in pins().items() if not name.startswith(CUDA) for entry in entries]
    LOCK.write_text("\n".join(kept) + "\n", encoding="utf-8")
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    wanted = {CORE: requirements(project, [])} | {extra: requirements(project, [extra]) for extra in optional}
    lines = []
    for extra, needed in ({BUILD: build} | wanted).items():
        if not {_name(line) for line in needed} - {"torch"} <= pins().keys():
            continue
        result = subprocess.run(
            [*command, "-", "-c", str(LOCK)], input="\n".join(needed), check=True, stdout=subprocess.PIPE, text=True
        )
        names = {_name(line) for line in result.stdout.splitlines()} & pins().keys()
        names |= {"torch"} & {_name(line) for line in needed}
        lines.append(f"{extra}: {' '.join(sorted(names))}\n")
    EXTRAS.write_text("".join(lines), encoding="utf-8")


def _name(line: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower().replace("_", "-")


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


if __name__ == "__main__":
    pyproject = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    if sys.argv[1:2] == ["--write"]:
        write(pyproject["project"], pyproject["build-system"]["requires"], sys.argv[2])
    else:
        loose = [f"+ {line}" for line in unlocked(pyproject["project"], sys.argv[1:])]
        sys.stdout.writelines(f"{line}\n" for line in [*locked(sys.argv[1:]), *loose])
