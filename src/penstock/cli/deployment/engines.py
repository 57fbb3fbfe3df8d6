"""``penstock engines``: separate interpreters for rollout engines whose dependencies conflict with Penstock's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.printing import Json, console, note, show_json, table
from penstock.local.engines import engine_problem, engine_python, environment_of, install_engine
from penstock.shared.config.rollout import ENVIRONMENT_OF, ENVIRONMENTS
from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError

__all__ = ["app", "interpreter_with"]

app = typer.Typer(
    name="engines",
    help="Rollout engines with interpreters of their own: install them, and see which are here.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def install(
    name: Annotated[str, typer.Argument(help=f"Engine: {', '.join(ENVIRONMENT_OF)}.")],
    *,
    python: Annotated[Path, typer.Option(help="Python interpreter of the new environment.")] = Path(sys.executable),
    again: Annotated[bool, typer.Option("--again", help="Remove the installation and install again.")] = False,
    as_json: Json = False,
) -> None:
    """Install an engine's pinned packages in a separate Python environment in PENSTOCK_ENGINES_DIR.

    A complete installation is left unchanged; an interrupted one is resumed.
    """
    found = install_engine(environment_of(name), load_settings().engines_dir, base=python, report=note, again=again)
    if as_json:
        show_json({"name": name, "python": str(found)})
    else:
        note(f"start it with: penstock up --engine {name}")


@app.command(name="ls")
def list_engines(*, as_json: Json = False) -> None:
    """List the engines, and the interpreter that runs each."""
    directory = load_settings().engines_dir
    rows = [(name, sys.executable, "") for name in ("embedded", "transformers")]
    for name in ENVIRONMENTS:
        problem = engine_problem(name, directory)
        rows.append((name, "" if problem else str(engine_python(name, directory)), problem))
    if as_json:
        show_json([{"name": name, "python": python, "problem": problem} for name, python, problem in rows])
        return
    shown = [(name, "missing" if problem else "ready", problem or python) for name, python, problem in rows]
    console().print(table(("ENGINE", "", "INTERPRETER"), shown))


def interpreter_with(engine: str) -> Path:
    """Return the interpreter of `--engine NAME` or `--engine NAME=PYTHON`; install it if it is missing.

    Raises:
        ConfigError: no such engine, or no such interpreter.
        Unavailable: the installation failed.
    """
    name, _, python = engine.partition("=")
    environment = environment_of(name)
    if python:
        found = Path(python).expanduser().absolute()  # not resolved: the symlink's location identifies the environment
        if not found.is_file():
            raise ConfigError(f"--engine {name}: there is no interpreter {found}")
        return found
    return install_engine(environment, load_settings().engines_dir, base=Path(sys.executable), report=note)
