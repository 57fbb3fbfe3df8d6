"""Process that tries the user code of a job before the job is submitted: code that rollout workers would import.

The process calls the function that orders the data (`data.curriculum`) on the first row, and the redaction function on
a text. It imports an engine's class and the code in a model's directory, but creates no engine or model.
``run_trial`` starts the process as ``python -m penstock.services.rollout.trial FD PARENT``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.shared.config.online.redaction import RedactionConfig
from penstock.shared.data.order import rank_of
from penstock.shared.data.redaction import Redactor
from penstock.shared.data.user_code import check_call, import_named, shown_name
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.trials import TrialRequest
from penstock.shared.runtime.user_process import Attempts, serve_trial

__all__ = ["MODULE", "try_code"]

MODULE = "penstock.services.rollout.trial"
TEXT = "My name is Ann Lee; write to ann@example.com or call +1 555 0100."
"""Text on which a redaction function is tried."""
_ENGINE_WORDS = ("max_running", "stop_ids", "detokenize", "threads")
"""Keyword arguments of an engine's class; its positional ones are the model files, the options and the settings."""


def try_code(request: TrialRequest, attempts: Attempts) -> None:
    """Try the user code that each part of ``request`` names. Import it; check that a function or an engine's class
    accepts the arguments that Penstock passes; call a function once."""
    trials: dict[str, Callable[[TrialRequest, Attempts, str, str], None]] = {
        "data.curriculum": _try_curriculum,
        "online.redaction.function": _try_redaction,
        "rollout.path": _try_engine,
        "model.trust_remote_code": _try_model,
    }
    for key, path in request.parts.items():
        trials[key](request, attempts, key, path)


def _try_curriculum(request: TrialRequest, attempts: Attempts, key: str, path: str) -> None:
    opened, rank = attempts.at(key, f"importing {shown_name(path)}", partial(_opened, path, "row", {}), fatal=True)
    if opened and request.row:
        call = partial(rank_of, rank, dict(request.row), "the first row")
        attempts.at(key, "calling it with the first row", call, fatal=False)


def _try_redaction(_: TrialRequest, attempts: Attempts, key: str, path: str) -> None:
    opened, find = attempts.at(key, f"importing {shown_name(path)}", partial(_opened, path, "text", TEXT), fatal=True)
    if opened:
        redactor = Redactor(RedactionConfig(function=path), find)
        attempts.at(key, f"calling it with {TEXT!r}", partial(redactor.find, TEXT), fatal=False)


def _try_engine(_: TrialRequest, attempts: Attempts, key: str, path: str) -> None:
    words = dict.fromkeys(_ENGINE_WORDS)
    shown = f"files, options, settings, *, {', '.join(_ENGINE_WORDS)}"
    opening = partial(_opened, path, shown, None, None, None, **words)
    attempts.at(key, f"importing {shown_name(path)}", opening, fatal=True)


def _try_model(_: TrialRequest, attempts: Attempts, key: str, path: str) -> None:
    if not (Path(path) / "config.json").is_file():  # an adapter; or another name, and nothing is downloaded for a trial
        return
    attempts.at(key, f"importing the code in {path}", partial(_import_model, path), fatal=True)


def _import_model(path: str) -> None:
    """Import a model directory's configuration class and model class, if the directory brings their code."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    described = AutoConfig.from_pretrained(path, trust_remote_code=True, local_files_only=True)
    name = getattr(described, "auto_map", {}).get("AutoModelForCausalLM")
    if name is not None:
        get_class_from_dynamic_module(name, path, local_files_only=True)


def _opened(path: str, shown: str, /, *args: Any, **named: Any) -> Any:
    found = import_named(path, what="the code", beside="rollout", error=ConfigError)
    check_call(found, f"'{shown_name(path)}'", shown, ConfigError, *args, **named)
    return found


def main() -> None:
    """Entry point of the process: run ``try_code`` once on the request from the parent process."""
    serve_trial("rollout", try_code)


if __name__ == "__main__":
    main()
