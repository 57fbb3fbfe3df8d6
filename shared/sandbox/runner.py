"""One run, in a separate process: drops all rights, then executes a program and its steps."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import random
import sys
import threading
import types
from typing import Any, NoReturn

from penstock.shared.sandbox.confine import SCRATCH, confine
from penstock.shared.sandbox.plan import READY, Job, Plan
from penstock.shared.sandbox.remote import Gone, RemoteNames, serve

__all__ = ["run"]

_RESULTS = 3
_ABOVE_ALL = 100
_MANY = 1 << 20

_STANDARD_LIBRARY = sys.path[1:]
"""Import path of programs: the warden's path without the location of Penstock. It contains no site packages."""

_compile, _eval, _exec, _dumps, _write, _exit = compile, eval, exec, json.dumps, os.write, os._exit
"""References to Python's own functions, taken before a program can replace them."""
_WHATEVER = (Exception, SystemExit, KeyboardInterrupt)
"""Types of all errors that a program may raise."""


def run(plan: Plan, descriptors: list[int], warden: int) -> NoReturn:
    """Read the job from the last of four ``descriptors`` (for standard input, standard output, results, job), execute
    it, and exit.

    The exit status is the program's. The results are ``READY``, then a line of JSON ``{"step", "nonce", "value"}`` for
    each step that did not raise; without ``READY`` the containment failed, and the results are the cause as text.
    """
    try:
        job_descriptor = _take(descriptors)
        confine(plan, warden)
        os.chdir(SCRATCH if plan.mechanism == "namespaces" else "/")
        job = Job(*json.loads(_read_all(job_descriptor)))
    except (OSError, ValueError, KeyError) as error:
        _write(_RESULTS, f"{type(error).__name__}: {error}".encode())
        _exit(1)
    _write(_RESULTS, READY)
    names = _fresh_main(plan.packages)
    status = _execute(job, names) if job.role != "judge" else _judge(job)
    _wind_up(names)
    _exit(status)


def _take(descriptors: list[int]) -> int:
    """Move the first three descriptors to 0, 1 and ``_RESULTS``, close all others except the descriptor of the job, and
    return that descriptor."""
    stdin, stdout, results, job = (fcntl.fcntl(number, fcntl.F_DUPFD, _ABOVE_ALL) for number in descriptors)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, place in ((stdin, 0), (stdout, 1), (nowhere, 2), (results, _RESULTS), (job, _RESULTS + 1)):
        os.dup2(number, place)
    os.closerange(_RESULTS + 2, _MANY)
    return _RESULTS + 1


def _read_all(descriptor: int) -> bytes:
    """Return the content of a file descriptor, and close it, so that the program cannot read the file again."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _fresh_main(packages: list[str]) -> dict[str, Any]:
    """Return a fresh ``__main__`` namespace, in which the program runs like the script of a new interpreter."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
        del sys.modules[name]
    sys.path[:] = [*_STANDARD_LIBRARY, *packages]
    sys.argv = ["program.py"]
    random.seed(0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return vars(module)


def _execute(job: Job, names: dict[str, Any]) -> int:
    """Execute the program, then its steps; return the exit status. An exception ends the run without a traceback."""
    try:
        if job.role == "program":
            return serve(job.program, names, 0, 1)
        _exec(_compile(job.program, "program.py", "exec"), names)
        for index, step in enumerate(job.steps):
            _take_step(index, step, job.nonce, names)
    except SystemExit as error:
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except _WHATEVER:
        return 1
    return 0


def _judge(job: Job) -> int:
    """Execute the steps of a judge; return the exit status. Names that neither the steps nor Python define are looked
    up in the program's process."""
    try:
        names = RemoteNames(0, 1, [each for step in job.steps for each in step.get("own", ())])
    except (Gone, OSError, ValueError):  # the program did not complete
        return 1
    for index, step in enumerate(job.steps):
        _take_step(index, step, job.nonce, names)
    return 0


def _wind_up(names: dict[str, Any]) -> None:
    """Perform the parts of an interpreter shutdown on which programs rely. A complete shutdown would take too long."""
    with contextlib.suppress(*_WHATEVER):
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        names.clear()  # flushes files that were not closed
        gc.collect()


def _take_step(index: int, step: dict[str, Any], nonce: str, names: dict[str, Any]) -> None:
    """Run a test's statements, or call a function, and report the value; a step that raises reports nothing."""
    try:
        value = None
        if "code" in step:
            _exec(_compile(step["code"], "test.py", "exec"), names)
        else:
            value = _eval(step["call"], names)(*step["args"], **step["kwargs"])
        line = _dumps({"step": index, "nonce": nonce, "value": value}, allow_nan=False)
    except _WHATEVER:
        return
    data = line.encode() + b"\n"
    while data:
        data = data[_write(_RESULTS, data) :]
