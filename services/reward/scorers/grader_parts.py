"""Parts of graders; each grades all samples of one data row."""

from __future__ import annotations

import ast
import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from penstock.services.reward.scorers.similarity import similarity
from penstock.shared.config.rewards.graders import PythonGrader, StringCheckGrader, TextSimilarityGrader
from penstock.shared.config.rewards.scorers import CodeScorer
from penstock.shared.config.rewards.slots import fill_slots
from penstock.shared.data.user_code import read_uploaded, shown_name
from penstock.shared.errors import SandboxError, ScoringError
from penstock.shared.protocol.grading import error_text
from penstock.shared.sandbox.plan import Job
from penstock.shared.sandbox.sandbox import Sandbox

__all__ = ["GradingError", "OpenPart", "PythonPart", "Sample", "StringCheck", "TextSimilarity", "fill", "sample_of"]

Sample = dict[str, Any]
"""Sample for graders: `output_text`, and `output_json` if the text is JSON."""
Score = float | ScoringError
_ENDED = "the source raised or exited before grade() returned a number: does it import what is missing?"
_CALL = """

def _penstock_grade(sample, item):
    try:
        return {"score": grade(sample, item)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
"""
"""Code that is appended to the program of a user's grader, so that any exception of ``grade`` is reported."""


class GradingError(ScoringError):
    """Failure of a grader; the text begins with the kind of error."""

    def __init__(self, flag: str, detail: str) -> None:
        super().__init__(error_text(flag, detail))


class OpenPart(Protocol):
    """Part of a grader after its resources are opened."""

    def grade(self, samples: Sequence[Sample], item: dict[str, Any], deadline: float) -> list[Score]:
        """Return one score or error per sample; ``deadline`` is in ``time.monotonic`` seconds."""
        ...

    def close(self) -> None:
        """Release processes and connections."""
        ...


def sample_of(completion: str) -> Sample:
    """Build the ``Sample`` of a completion, which graders read."""
    sample: Sample = {"output_text": completion}
    with contextlib.suppress(orjson.JSONDecodeError):
        sample["output_json"] = orjson.loads(completion)
    return sample


def fill(text: str, item: dict[str, Any], sample: Sample) -> str:
    """Fill the slots of ``text`` from ``item`` and ``sample``. Raises GradingError if a value is missing."""
    try:
        return fill_slots(text, item, sample)
    except LookupError as error:
        detail = str(error.args[0])
        flag = "sample_parse_error" if "sample.output_json" in detail else "invalid_variable_error"
        raise GradingError(flag, detail) from None
    except RecursionError:
        raise GradingError("sample_parse_error", "the JSON nests too deeply to be written out") from None


class _Filled:
    """Base of graders that compare two texts for each sample."""

    def __init__(self, config: StringCheckGrader | TextSimilarityGrader) -> None:
        self._config = config

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def grade(self, samples: Sequence[Sample], item: dict[str, Any], deadline: float) -> list[Score]:
        """Return one score or error per sample; see ``OpenPart.grade``."""
        return [self._grade(sample, item) for sample in samples]

    def _grade(self, sample: Sample, item: dict[str, Any]) -> Score:
        try:
            text, reference = (fill(slots, item, sample) for slots in (self._config.input, self._config.reference))
        except GradingError as error:
            return error
        try:
            return self._compare(text, reference)
        except ValueError as error:
            return GradingError("other_error", str(error))

    def _compare(self, text: str, reference: str) -> float:
        """Return the score of ``text`` compared with ``reference``. Raises ValueError if the texts cannot be
        compared."""
        raise NotImplementedError


class StringCheck(_Filled):
    """Returns 1 if the two texts satisfy the configured operation (equal, different or contained), else 0."""

    _config: StringCheckGrader

    def _compare(self, text: str, reference: str) -> float:
        match self._config.operation:
            case "eq":
                return float(text == reference)
            case "ne":
                return float(text != reference)
            case "like":
                return float(reference in text)
            case "ilike":
                return float(reference.casefold() in text.casefold())


class TextSimilarity(_Filled):
    """Returns the similarity of two texts, from 0 to 1."""

    _config: TextSimilarityGrader

    def _compare(self, text: str, reference: str) -> float:
        return similarity(self._config.evaluation_metric, text, reference)


def _takes_two(args: ast.arguments) -> bool:
    """Return True if a function with these parameters accepts two positional arguments."""
    plain = len(args.posonlyargs) + len(args.args)
    required = plain - len(args.defaults)
    return required <= 2 and (plain >= 2 or args.vararg is not None) and None not in args.kw_defaults


def _source_of(config: PythonGrader) -> tuple[str, str]:
    """Return the source of a Python grader, and a name of it for messages. Raises GradingError if its file cannot be
    read."""
    if config.path is None:
        assert config.source is not None, "checked with the configuration"
        return config.source, "the source"
    try:
        data = read_uploaded(config.path, what="the grader", beside="reward", error=ScoringError)
    except ScoringError as error:
        raise GradingError("python_grader_server_error", str(error)) from None
    return data.decode(), shown_name(config.path).partition(":")[0]


class PythonPart:
    """Calls ``grade(sample, item)`` of a program, each time in a separate run in the sandbox."""

    def __init__(self, config: PythonGrader, time_limit_s: float) -> None:
        """Start the sandbox.

        Raises:
            GradingError: the source has no ``grade``, its uploaded file cannot be read, or this machine has no sandbox.
        """
        self._source, where = _source_of(config)
        self._time_limit_s = time_limit_s
        try:
            body = ast.parse(self._source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise GradingError("python_grader_runtime_error", f"{where} is not Python: {error}") from None
        grade = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "grade"]
        if not grade:
            raise GradingError("python_grader_runtime_error", f"{where} defines no function grade(sample, item)")
        if not _takes_two(grade[-1].args):
            detail = f"grade() in line {grade[-1].lineno} of {where} cannot be called with (sample, item)"
            raise GradingError("python_grader_runtime_error", detail)
        try:
            self._sandbox = Sandbox(CodeScorer(time_limit_s=time_limit_s))
        except SandboxError as error:
            raise GradingError("python_grader_server_error", str(error)) from None

    def close(self) -> None:
        """Close the sandbox."""
        self._sandbox.close()

    def grade(self, samples: Sequence[Sample], item: dict[str, Any], deadline: float) -> list[Score]:
        """Return one score or error per sample; see ``OpenPart.grade``."""
        return [self._grade(sample, item, deadline) for sample in samples]

    def _grade(self, sample: Sample, item: dict[str, Any], deadline: float) -> Score:
        try:
            found = self._run(sample, item, min(self._time_limit_s, deadline - time.monotonic()))
        except GradingError as error:
            return error
        value = found.get("score")
        if "error" in found:
            return GradingError("python_grader_runtime_error", f"grade() raised {found['error']}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return GradingError("python_grader_runtime_error", f"grade() returned {str(value)[:80]!r}, not a number")
        try:
            return float(value)
        except OverflowError:
            return GradingError("python_grader_runtime_error", "grade() returned an integer beyond all floats")

    def _run(self, sample: Sample, item: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Run ``grade`` in the sandbox; return ``{"score": result}``, or ``{"error": text}`` if it raised an exception.
        Raises GradingError if the run gives neither."""
        if limit_s <= 0:
            raise GradingError("unresponsive_reward_error", "no time was left before the deadline")
        step = {"call": "_penstock_grade", "args": [sample, item], "kwargs": {}}
        try:
            outcome = self._sandbox.run(Job(self._source + _CALL, [step], secrets.token_hex(16)), "", limit_s)
        except SandboxError as error:
            raise GradingError("python_grader_server_error", str(error)) from None
        if outcome.verdict.ending == "time":
            raise GradingError("unresponsive_reward_error", f"grade() took longer than {limit_s:.1f} s")
        found = outcome.steps.get(0)
        if not isinstance(found, dict):
            raise GradingError("python_grader_runtime_error", _ENDED)
        return found
