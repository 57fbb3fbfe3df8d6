"""Handle of a sandbox: starts the warden, proves containment, runs jobs and collects their output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import penstock
from penstock.shared.errors import SandboxError
from penstock.shared.sandbox.collect import Outcome, collect
from penstock.shared.sandbox.confine import SCRATCH
from penstock.shared.sandbox.landlock import landlock_version
from penstock.shared.sandbox.plan import START_LIMIT_S, Job, Mechanism, Plan

__all__ = ["Limits", "Sandbox", "breaches"]


_PROGRAM = """
import os, socket

def attempt(what, action):
    try:
        action()
    except (OSError, ValueError):
        return []
    return [what]

def read(path):
    with open(path, "rb") as file:
        assert file.read(1)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def breaches(folder, port, parent):
    here = ("127.0.0.1", port)
    return [
        *attempt("open a TCP connection", lambda: socket.create_connection(here, 2)),
        *attempt("send a datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", here)),
        *attempt("reach a local socket", lambda: socket.socket(socket.AF_UNIX).connect(folder + "/socket")),
        *attempt("read a file outside", lambda: read(folder + "/secret")),
        *attempt("write over a file outside", lambda: write(folder + "/secret")),
        *attempt("write a new file outside", lambda: write(folder + "/new")),
        *attempt("remove a file outside", lambda: os.unlink(folder + "/secret")),
        *attempt("change a file's mode outside", lambda: os.chmod(folder + "/secret", 0o777)),
        *attempt("read the environment of its parent", lambda: read(f"/proc/{parent}/environ")),
        *(attempt("signal its parent", lambda: os.kill(parent, 0)) if parent > 2 else []),
    ]
"""


def breaches(run: Callable[[Job], dict[int, Any]]) -> list[str]:
    """Run a test program that attempts forbidden actions; return the attempts that succeeded (empty if containment
    holds)."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as local:
        secret = Path(folder, "secret")
        secret.write_text("secret")
        secret.chmod(0o666)
        Path(folder).chmod(0o777)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        local.bind(f"{folder}/socket")
        local.listen()
        attempt = {"call": "breaches", "args": [folder, tcp.getsockname()[1], os.getpid()], "kwargs": {}}
        steps = run(Job(_PROGRAM, [attempt], secrets.token_hex(8)))
    found = steps.get(0)
    return found if isinstance(found, list) else ["end the proof before it was given"]


_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from penstock.shared.sandbox.warden import main; "
    "main(int(sys.argv[2]), sys.argv[3])"
)
_ENVIRONMENT = {
    "HOME": SCRATCH,
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # equal scores for equal programs
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_RUN = b"run"
_END_S = 0.2
"""Time for a program to end after its judge has ended (seconds)."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Limits(Protocol):
    """Limits of a program, as the caller configures them."""

    @property
    def time_limit_s(self) -> float:
        """Wall-clock limit (seconds), which also bounds CPU time."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Maximum address space of one process (bytes)."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Maximum total size of files in the program's private directory (bytes)."""
        ...

    @property
    def output_bytes(self) -> int:
        """Maximum size of the program's output (bytes)."""
        ...

    @property
    def max_processes(self) -> int:
        """Maximum number of processes and threads together. 1: no further process; threads have a separate, fixed
        limit."""
        ...

    @property
    def site_packages(self) -> bool:
        """True if the program can import the packages that are installed for this process."""
        ...

    @property
    def preload(self) -> list[str]:
        """Modules imported once for all runs."""
        ...


class Sandbox:
    """Runs programs one after another, contained by the first mechanism that works on this machine."""

    _channel: socket.socket

    def __init__(self, config: Limits, mechanisms: Sequence[Mechanism] = ("namespaces", "landlock")) -> None:
        """Start the warden with the first mechanism that works. Raises SandboxError, with the reasons, if no mechanism
        works: programs never run without containment."""
        self._config = config
        self.mechanism = mechanisms[0]
        self._process: subprocess.Popen[bytes] | None = None
        problems = []
        for mechanism in mechanisms:
            self.mechanism = mechanism
            try:
                self._start()
                self._prove()
            except SandboxError as error:
                self.close()
                problems.append(f"{mechanism}: {error}")
            else:
                return
        raise SandboxError(
            "no sandbox on this machine contains programs, so none is run. "
            + "; ".join(problems)
            + ". Allow user namespaces, add the capability SYS_ADMIN, or use a kernel with Landlock (docs/rewards.md)"
        )

    def close(self) -> None:
        """End the warden and its runs."""
        if self._process is not None:
            self._channel.close()
            self._process.kill()  # its child is killed with it
            self._process.wait()
            self._process = None

    def run(self, job: Job, stdin: str, limit_s: float) -> Outcome:
        """Execute a job within ``limit_s`` seconds of wall-clock time. The time counts from the moment at which the job
        is contained.

        Raises:
            SandboxError: the sandbox itself failed, whatever the program did, or the job is nested too deeply to be
                sent.
        """
        with contextlib.ExitStack() as files:
            out, write_out = _pipe(files)
            results = self._begin(job, files.enter_context(_sealed(stdin)), write_out.fileno(), files)
            write_out.close()
            return self._finish(job, out, results, limit_s)

    def judge(self, program: Job, judge: Sandbox, steps: Job, limit_s: float) -> Outcome:
        """Execute a program in this sandbox, and tests that call its functions in another sandbox. ``program`` is the
        program, ``steps`` are the tests, and ``judge`` is the sandbox of the tests.

        The sandboxes share only two pipes. The outcome returned is the outcome of the steps.

        Raises:
            SandboxError: as ``run``.
        """
        with contextlib.ExitStack() as files:
            asked, ask = _pipe(files)
            answered, answer = _pipe(files)
            nothing, closed = _pipe(files)
            closed.close()
            more = self._begin(program, asked.fileno(), answer.fileno(), files)
            try:
                results = judge._begin(steps, answered.fileno(), ask.fileno(), files)
            except BaseException:
                self.close()  # the program waits for a judge
                raise
            for end in (asked, ask, answered, answer):  # copies would hide the end of a process
                end.close()
            try:
                return judge._finish(steps, nothing, results, limit_s)
            finally:
                self._finish(program, nothing, more, _END_S)

    def _begin(self, job: Job, stdin: int, out: int, files: contextlib.ExitStack) -> IO[bytes]:
        """Start a run; return the pipe from which its results are read. Raises SandboxError."""
        try:
            described = json.dumps(job)
        except RecursionError:
            raise SandboxError("what the program is given nests too deeply") from None
        if self._process is None:
            self._start()
        results, write_results = _pipe(files)
        try:
            with _sealed(described) as job_file:
                socket.send_fds(self._channel, [_RUN], [stdin, out, write_results.fileno(), job_file])
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox failed: {error}") from None
        write_results.close()
        return results

    def _finish(self, job: Job, out: IO[bytes], results: IO[bytes], limit_s: float) -> Outcome:
        """Wait for the end of a run and return its outcome. Raises SandboxError."""
        limits: dict[str, Any] = {"limit_s": limit_s, "output_bytes": self._config.output_bytes}
        try:
            return collect(self._channel, out.fileno(), results.fileno(), nonce=job.nonce, **limits)
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox failed: {error}") from None
        except BaseException:
            self.close()  # the run may still be active
            raise

    def _start(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("only Linux has what containment needs")
        plan = self._plan()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(penstock.__file__).parent.parent)
        with theirs:
            arguments = [root, str(theirs.fileno()), json.dumps(plan)]
            self._process = subprocess.Popen(
                [sys.executable, *("-s", "-S", "-P", "-B", "-X", "utf8", "-c", _START), *arguments],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                cwd="/",
            )
        self._channel.settimeout(START_LIMIT_S)
        try:
            answer = self._channel.recv(4096)
            problem = json.loads(answer) if answer else "the warden died at its start; its log says why"
        except OSError as error:
            problem = f"the warden does not start: {error}"
        if problem:
            self.close()  # a later message would be mistaken for the end of a run
            raise SandboxError(problem)

    def _plan(self) -> Plan:
        config = self._config
        if self.mechanism == "landlock" and landlock_version() == 0:
            raise SandboxError("this kernel has no Landlock, has it switched off, or a container withholds it")
        if self.mechanism == "landlock" and config.max_processes > 1:
            raise SandboxError("max_processes above 1 needs namespaces: processes could not be ended as a whole")
        packages = site.getsitepackages() if config.site_packages else []
        readable = _outermost([sys.base_prefix, sysconfig.get_path("stdlib"), *packages, *_SYSTEM])
        hidden = [path for path in readable if Path(path).is_relative_to(SCRATCH)]
        if hidden and self.mechanism == "namespaces":
            raise SandboxError(f"Python lies in {hidden[0]}, where programs get their private {SCRATCH}")
        return Plan(
            mechanism=self.mechanism,
            parent=os.getpid(),
            readable=readable,
            packages=packages,
            preload=config.preload,
            cpu_s=math.ceil(config.time_limit_s) + 1,
            memory_bytes=config.memory_bytes,
            scratch_bytes=config.scratch_bytes,
            max_processes=config.max_processes,
        )

    def _prove(self) -> None:
        """Check that forbidden actions fail inside the sandbox.

        Raises:
            SandboxError: an attempt succeeded.
        """
        if found := breaches(lambda job: self.run(job, "", START_LIMIT_S).steps):
            raise SandboxError(f"a program could {', '.join(found)}")


def _pipe(files: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return the reading and the writing end of a new pipe. When the exit stack ``files`` is left, it closes both ends,
    unless the caller has closed them."""
    read, write = os.pipe()
    return files.enter_context(os.fdopen(read, "rb", 0)), files.enter_context(os.fdopen(write, "wb", 0))


def _environment() -> dict[str, str]:
    """Return the environment variables of the warden and of programs; only LD_LIBRARY_PATH comes from this process."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return _ENVIRONMENT | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


@contextlib.contextmanager
def _sealed(text: str) -> Iterator[int]:
    """Yield a descriptor of an immutable file in memory with ``text``."""
    descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode(errors="surrogatepass"))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _outermost(paths: list[str]) -> list[str]:
    """Return the directories among ``paths``, sorted. Leave out symbolic links, and directories inside another one."""
    found = {path for path in paths if Path(path).is_dir() and not Path(path).is_symlink()}
    return sorted(path for path in found if not any(Path(path).is_relative_to(o) for o in found - {path}))
