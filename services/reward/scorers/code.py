"""Scorer that runs programs against tests in a sandbox."""

from __future__ import annotations

import ast
import builtins
import math
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from penstock.shared.config.rewards.scorers import CodeScorer
from penstock.shared.data.code_tests import CallTest, StatementTest, StreamTest, parse_tests
from penstock.shared.errors import DataError, SandboxError, ScoringError
from penstock.shared.sandbox.plan import Job
from penstock.shared.sandbox.sandbox import Sandbox

__all__ = ["Code", "builtins_tested", "equal_values", "program_of"]

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = {"", "py", "python", "python3"}
_FLOAT_TOLERANCE = 1e-9


class Code:
    """Returns 1 if the completion's program passes all tests of the row, else 0; with ``partial`` the fraction passed.

    A program that fails, crashes, exceeds its time or attempts to escape scores 0. A failure of the sandbox fails the
    completion.
    """

    def __init__(self, config: CodeScorer) -> None:
        """Start the sandbox. Raises ScoringError if this machine supports no sandbox."""
        self._config = config
        try:
            self._sandbox = Sandbox(config)
        except SandboxError as error:
            raise ScoringError(str(error)) from None
        self._judge: Sandbox | None = None
        """Sandbox for test statements; started when the first row with test statements comes."""
        self.about = f"sandbox: {self._sandbox.mechanism}"

    def close(self) -> None:
        """Close the sandboxes."""
        self._sandbox.close()
        if self._judge is not None:
            self._judge.close()

    def score(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> float:
        """Return a score from 0 to 1.

        Raises:
            ScoringError: the row has no usable tests, or the sandbox failed.
        """
        try:
            tests = parse_tests(row, self._config.tests, "the row")
        except DataError as error:
            raise ScoringError(str(error)) from None
        program = program_of(completion)
        if not program.strip():
            return 0.0
        try:
            return self._share_passed(program, tests)
        except SandboxError as error:
            raise ScoringError(str(error)) from None

    def _share_passed(self, program: str, tests: Sequence[StatementTest | CallTest | StreamTest]) -> float:
        """Return the fraction of tests that pass; without ``partial``, return 1 if all pass, else 0. Raises
        SandboxError."""
        deadline = time.monotonic() + self._config.time_limit_s
        steps: list[StatementTest | CallTest] = [test for test in tests if not isinstance(test, StreamTest)]
        passed = self._passed_steps(program, steps, deadline)
        done = len(steps)
        for test in tests:
            if isinstance(test, StreamTest) and (self._config.partial or passed == done):
                passed += self._passes(program, test, deadline)
                done += 1
        return passed / len(tests) if self._config.partial else float(passed == len(tests))

    def _passed_steps(self, program: str, tests: Sequence[StatementTest | CallTest], deadline: float) -> int:
        """Run all statements and calls one after another, in one run of the program; return how many of them pass.

        Statements decide whether they pass, so they never share a process with the program. A call only reports a
        value, which this process compares.
        """
        if not tests:
            return 0
        steps, nonce = [_step(test) for test in tests], secrets.token_hex(16)
        if statements := [test.code for test in tests if isinstance(test, StatementTest)]:
            steps[0]["own"] = builtins_tested(statements)
            self._judge = self._judge or Sandbox(self._config, [self._sandbox.mechanism])
            outcome = self._sandbox.judge(
                Job(program, [], "", "program"), self._judge, Job("", steps, nonce, "judge"), _left(deadline)
            )
        else:
            outcome = self._sandbox.run(Job(program, steps, nonce), "", _left(deadline))
        return sum(
            isinstance(test, StatementTest) or equal_values(outcome.steps[index], test.returns)
            for index, test in enumerate(tests)
            if index in outcome.steps
        )

    def _passes(self, program: str, test: StreamTest, deadline: float) -> bool:
        """Return True if a separate run of the program, which cannot see the expected output of ``test``, prints this
        output."""
        if time.monotonic() >= deadline:
            return False
        outcome = self._sandbox.run(Job(program, [], ""), test.stdin, _left(deadline))
        return outcome.ok and _lines(outcome.stdout.decode(errors="replace")) == _lines(test.stdout)


def program_of(completion: str) -> str:
    """Return the last fenced block that is marked as Python or unmarked, or the whole text."""
    blocks = [match["code"] for match in _BLOCK.finditer(completion) if match["language"].lower() in _PYTHON]
    return blocks[-1] if blocks else completion


def equal_values(found: Any, wanted: Any) -> bool:
    """Return True if two JSON values are equal; floats within 1e-9, relative or absolute; ``True`` is not 1."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        if isinstance(found, int) and isinstance(wanted, int):
            return found == wanted
        return math.isclose(_float(found), _float(wanted), rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(equal_values, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(equal_values(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def builtins_tested(statements: Sequence[str]) -> list[str]:
    """Return ``[name]`` if ``statements`` use exactly one name that they do not define, not counting exceptions, and
    Python has a builtin of this name. The statements then test the program's own function of this name. Else return [].

    ``assert sum(10, 15) == 6`` tests the program's ``sum``, because the statement uses nothing else of the program. If
    statements use other names, their builtins stay Python's: otherwise a program could replace ``all``.
    """
    used, made = set[str](), set[str]()
    try:
        nodes = [node for code in statements for node in ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError):
        return []
    for node in nodes:
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
    found = {name for name in used - made if not _is_error(name)}
    return list(found) if len(found) == 1 and all(hasattr(builtins, name) for name in found) else []


def _is_error(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _float(value: float) -> float:
    """Convert to float; an integer beyond the float range becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _step(test: StatementTest | CallTest) -> dict[str, Any]:
    if isinstance(test, StatementTest):
        return {"code": test.code}
    return {"call": test.call, "args": test.args, "kwargs": test.kwargs}


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def _lines(text: str) -> list[str]:
    """Split into lines without trailing blanks and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
