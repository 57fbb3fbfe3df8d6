"""Programs that attack: every mechanism of this machine must contain each of them, and nothing may be left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.shared.config.rewards.scorers import CodeScorer
from penstock.shared.errors import SandboxError
from penstock.shared.sandbox.collect import Outcome
from penstock.shared.sandbox.landlock import landlock_version
from penstock.shared.sandbox.plan import Job, Mechanism
from penstock.shared.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containment is made of Linux features")

SETTINGS = {"time_limit_s": 20.0, "memory_bytes": 256 << 20, "output_bytes": 64 << 10, "scratch_bytes": 1 << 20}


def settings(**changes: Any) -> CodeScorer:
    return CodeScorer.parse({**SETTINGS, **changes})


@pytest.fixture(scope="module", params=get_args(Mechanism))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox with one mechanism; skips the test if this machine does not have the mechanism."""
    try:
        opened = Sandbox(settings(), [request.param])
    except SandboxError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def family() -> Iterator[Sandbox]:
    """A sandbox whose programs may start processes."""
    try:
        opened = Sandbox(settings(max_processes=16), ["namespaces"])
    except SandboxError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


def script(sandbox: Sandbox, program: str, stdin: str = "", limit_s: float = 20.0) -> Outcome:
    """Run a program, check that nothing of it is left, and return its outcome."""
    outcome = sandbox.run(Job(program, [], ""), stdin, limit_s)
    assert survivors(sandbox) == []
    return outcome


def ask(sandbox: Sandbox, program: str, *arguments: Any) -> Any:
    """Run a program, and return the value of its function ``f`` for these arguments."""
    job = Job(program, [{"call": "f", "args": list(arguments), "kwargs": {}}], "nonce")
    outcome = sandbox.run(job, "", 20.0)
    assert survivors(sandbox) == []
    assert 0 in outcome.steps, f"the program raised ({outcome})"
    return outcome.steps[0]


def children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except FileNotFoundError:
        return []


def survivors(sandbox: Sandbox) -> list[int]:
    """Return the processes below the warden that belong to programs, zombies included."""
    assert sandbox._process is not None
    below = children(sandbox._process.pid)
    return [pid for child in below for pid in children(child)] if sandbox.mechanism == "namespaces" else below


def eventually(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_of_a_program_are_bounded(sandbox: Sandbox) -> None:
    """Also with Landlock alone, where the kernel counts all threads of the user, and exempts root."""
    most, hard = ask(sandbox, "import resource\ndef f(): return resource.getrlimit(resource.RLIMIT_NPROC)")
    assert 0 < most == hard < 20_000


# -- what programs may do --------------------------------------------------------------------------------------------


def test_programs_read_write_and_compute(sandbox: Sandbox) -> None:
    program = "import sys, json, collections\nn = int(input())\nprint(n * 2)\nprint(sys.argv, __name__)"
    outcome = script(sandbox, program, "21\n")
    assert outcome.ok
    assert outcome.stdout == b"42\n['program.py'] __main__\n"
    assert ask(sandbox, "def f(a, b): return {'sum': [a + b]}", 1, 2) == {"sum": [3]}


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.stdout.write('all')",
        "import sys; sys.stdout.write('all'); sys.exit()",
        "out = open(1, 'w'); out.write('all')",
        "import atexit; atexit.register(lambda: print('all'))",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('all'))).start()",
        "import io, os, sys\nsys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, 'w')))\nprint('all')",
    ],
)
def test_output_is_complete_as_at_the_end_of_an_interpreter(sandbox: Sandbox, program: str) -> None:
    outcome = script(sandbox, program)
    assert outcome.ok
    assert outcome.stdout.strip() == b"all"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit('x')", 1),
        ("raise SystemExit(-1)", 255),
        ("1 / 0", 1),
    ],
)
def test_exit_status_is_that_of_an_interpreter(sandbox: Sandbox, program: str, status: int) -> None:
    assert script(sandbox, program).verdict.status == status


def test_runs_do_not_depend_on_chance_or_each_other(sandbox: Sandbox) -> None:
    program = "import random, sys\nprint(random.random(), hash('x'), list({'a', 'b', 'c'}), sys.modules.get('leak'))"
    first = script(sandbox, program)
    script(sandbox, "import sys, random, builtins\nsys.modules['leak'] = 1\nrandom.random()\nbuiltins.print = None")
    assert script(sandbox, program).stdout == first.stdout


def test_large_input_passes(sandbox: Sandbox) -> None:
    assert script(sandbox, "import sys\nprint(len(sys.stdin.read()))", "x" * 3_000_000).stdout == b"3000000\n"


# -- exhausting resources ---------------------------------------------------------------------------------------------

FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"


COUNT_CHILDREN = """
import os, time

def f():
    n = 0
    try:
        while os.fork():
            n += 1
        time.sleep(60)
    except OSError:
        return n
"""
GROW = """
x = []

def f():
    try:
        while True:
            x.append(bytearray(1 << 20))
    except MemoryError:
        return len(x)
"""
IGNORE_SIGNALS = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
while True:
    pass
"""


def test_fork_bomb_makes_no_process(sandbox: Sandbox) -> None:
    assert ask(sandbox, COUNT_CHILDREN) == 0
    assert script(sandbox, FORK_BOMB, limit_s=0.5).verdict.ending == "time"
    assert script(sandbox, "print(1)").ok


def test_fork_bomb_is_bounded_where_processes_are_allowed(family: Sandbox) -> None:
    assert ask(family, COUNT_CHILDREN) == 15
    assert script(family, FORK_BOMB, limit_s=0.5).verdict.ending == "time"
    assert script(family, "print(1)").ok


def test_memory_bomb_ends_itself(sandbox: Sandbox) -> None:
    assert script(sandbox, "x = bytearray(1 << 30)").verdict.ending == "exit"
    assert ask(sandbox, GROW) < 256
    shared = "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(64)]"
    assert not script(sandbox, shared).ok


def test_memory_outside_the_address_space_is_closed(sandbox: Sandbox) -> None:
    for what in ("os.memfd_create('x')", "ctypes_shmget()"):
        program = (
            "import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndef ctypes_shmget():\n"
            "    if libc.shmget(0, 1 << 20, 0o1600) < 0: raise OSError\n"
            f"def f():\n    try:\n        {what}\n        return 'made'\n    except OSError:\n        return 'refused'"
        )
        assert ask(sandbox, program) == "refused"


def test_endless_loop_ends_at_the_limit(sandbox: Sandbox) -> None:
    outcome = script(sandbox, "while True: pass", limit_s=0.3)
    assert outcome.verdict.ending == "time"
    assert script(sandbox, IGNORE_SIGNALS, limit_s=0.3).verdict.ending == "time"


def test_sandbox_overhead_does_not_count_as_time_of_the_program(sandbox: Sandbox) -> None:
    for _ in range(20):
        assert script(sandbox, "import time\ntime.sleep(5)", limit_s=0.001).verdict.ending == "time"


def test_output_flood_is_cut_off(sandbox: Sandbox) -> None:
    outcome = script(sandbox, "import os\nwhile True: os.write(1, b'x' * 65536)", limit_s=20.0)
    assert outcome.flooded and not outcome.ok
    assert len(outcome.stdout) < 256 << 10
    assert script(sandbox, "import os\nwhile True: os.write(3, b'x' * 65536)").flooded
    assert script(sandbox, "print(1)").ok


ONE_LARGE_FILE = """
def f():
    with open("/tmp/x", "wb") as file:
        for n in range(64):
            file.write(bytes(1 << 18))
            file.flush()
"""
MANY_FILES = """
def f():
    for n in range(4096):
        with open(f"/tmp/{n}", "wb") as file:
            file.write(bytes(1 << 16))
"""


def test_scratch_is_private_bounded_and_gone(sandbox: Sandbox) -> None:
    for program in (ONE_LARGE_FILE, MANY_FILES):
        outcome = sandbox.run(Job(program, [{"call": "f", "args": [], "kwargs": {}}], "n"), "", 20.0)
        assert outcome.steps == {}, "the program wrote more than it may"
    if sandbox.mechanism == "namespaces":
        assert script(sandbox, "open('/tmp/here', 'w').write('x'); print(open('/tmp/here').read())").stdout == b"x\n"
        assert ask(sandbox, "import os\ndef f(): return os.listdir('/tmp')") == []
    assert not Path("/tmp/here").exists()


# -- escaping ---------------------------------------------------------------------------------------------------------

ATTEMPT = """
import ctypes, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)

def f(what):
    try:
        return eval(what) or "done"
    except Exception as error:
        return type(error).__name__

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def send_by_pair(address):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.sendto(b"x", address)
"""
REFUSED = {"PermissionError", "FileNotFoundError", "OSError", "ProcessLookupError"}


def test_nothing_outside_can_be_written_or_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for path in (tmp_path, tmp_path.parent):
        path.chmod(0o777)
    secret.chmod(0o666)
    link = tmp_path / "link"
    link.symlink_to(secret)
    before = secret.stat()
    for what in (
        f"open('{secret}').read()", f"open('{secret}', 'w')", f"open('{secret}', 'a')", f"open('{tmp_path}/new', 'w')",
        f"open('{link}', 'r+')", f"os.unlink('{secret}')", f"os.rename('{secret}', '/tmp/x')",
        f"os.mkdir('{tmp_path}/d')", f"os.chmod('{secret}', 0)", f"os.utime('{secret}', (0, 0))",
        f"os.truncate('{secret}', 0)", f"os.symlink('/', '{tmp_path}/s')", f"os.link('{secret}', '{tmp_path}/h')",
        f"os.mkfifo('{tmp_path}/f')", f"os.setxattr('{secret}', 'user.x', b'y')",
        f"os.listdir('{tmp_path}')", "open('/etc/hostname')",
        "open('/dev/shm/penstock-was-here', 'w')", "open('/usr/penstock-was-here', 'w')",
        "open('/proc/self/mem', 'r+')", "os.chroot('/')", "call('mount', b'x', b'/tmp', b'tmpfs', 0, None)",
        "call('unshare', 0x10000000)", "os.open('/', os.O_TMPFILE | os.O_RDWR)",
    ):  # fmt: skip
        assert ask(sandbox, ATTEMPT, what) in REFUSED, what
    after = secret.stat()
    assert (secret.read_text(), after.st_mode, after.st_mtime) == ("secret", before.st_mode, before.st_mtime)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "secret"]
    assert not Path("/dev/shm/penstock-was-here").exists()


OPEN_DESCRIPTORS = """
import os

def f():
    found = []
    for number in range(1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.append(number)
    return found
"""


def test_environment_and_descriptors_of_the_parent_stay_outside(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "environ-secret")
    seen = set(ask(sandbox, "import os\ndef f(): return list(os.environ)"))
    own = {"HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONHASHSEED"}
    assert own <= seen <= own | {"LD_LIBRARY_PATH"}
    for pid in (os.getpid(), os.getppid(), 1, "self"):
        assert ask(sandbox, ATTEMPT, f"open('/proc/{pid}/environ').read()") in REFUSED
        assert ask(sandbox, ATTEMPT, f"open('/proc/{pid}/mem', 'rb')") in REFUSED
    assert ask(sandbox, OPEN_DESCRIPTORS) == [0, 1, 2, 3]
    assert ask(sandbox, ATTEMPT, f"call('ptrace', 16, {os.getpid()}, 0, 0)") in REFUSED


def test_no_network(sandbox: Sandbox, tmp_path: Path) -> None:
    abstract = f"\0penstock-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hidden,
    ):
        udp.bind(("127.0.0.1", 0))
        local.bind(str(tmp_path / "socket"))
        hidden.bind(abstract)
        for one in (tcp, udp, local, hidden):
            one.setblocking(False)
        for what in (
            f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 5)",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))",
            f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '{tmp_path}/socket')",
            f"send_by_pair('{tmp_path}/socket')", f"send_by_pair({abstract!r})",
            f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect({abstract!r})",
            f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendmsg([b'x'], [], 0, {abstract!r})",
            "socket.create_server(('127.0.0.1', 0))", "socket.getaddrinfo('localhost', 80)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        ):  # fmt: skip
            assert ask(sandbox, ATTEMPT, what) in REFUSED | {"gaierror"}, what
        with pytest.raises(BlockingIOError):
            tcp.accept()
        for one in (udp, local, hidden):
            with pytest.raises(BlockingIOError):
                one.recv(1)


def test_other_processes_cannot_be_harmed(sandbox: Sandbox) -> None:
    assert sandbox._process is not None
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as victim:
        try:
            for pid in (victim.pid, os.getpid(), os.getppid(), sandbox._process.pid, 1, 0, -1, -victim.pid):
                for what in (f"os.kill({pid}, signal.SIGKILL)", f"call('tgkill', {pid}, {pid}, 9)"):
                    ask(sandbox, ATTEMPT, what) if pid > 1 else script(sandbox, f"{ATTEMPT}\nf('{what}')")
            for what in (
                f"os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)", f"os.sched_setaffinity({victim.pid}, {{0}})",
                f"call('prlimit64', {victim.pid}, 0, b'\\0' * 16, None)", f"os.pidfd_open({victim.pid})",
                "call('prctl', 1, 0, 0, 0, 0)",
            ):  # fmt: skip
                assert ask(sandbox, ATTEMPT, what) in REFUSED, what
            assert victim.poll() is None
        finally:
            victim.kill()


SIGNAL_PROCESS_1 = """
import os
for number in range(1, 32):
    try:
        os.kill(1, number)
    except OSError:
        pass
print("tried")
"""


def test_daemonised_children_and_zombies_end_with_the_run(family: Sandbox) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 64)\n"
        "        time.sleep(600)\n    os._exit(0)\nif os.fork() == 0: os._exit(0)\nprint('parent ends')"
    )
    assert script(family, daemon).stdout == b"parent ends\n"
    assert b"tried" in script(family, SIGNAL_PROCESS_1).stdout
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    assert ask(family, ATTEMPT, f"call('syscall', {clone}, 0x10000000 | 17, 0, 0, 0, 0)") in REFUSED, "a namespace"
    executed = "import subprocess\nprint(subprocess.run(['/bin/echo', 'hello'], capture_output=True, text=True).stdout)"
    assert script(family, executed).stdout == b"hello\n\n"


# -- life ------------------------------------------------------------------------------------------------------------


def test_killed_warden_fails_one_run_only(sandbox: Sandbox) -> None:
    assert sandbox._process is not None
    below = children(sandbox._process.pid) if sandbox.mechanism == "namespaces" else []
    os.kill(below[0] if below else sandbox._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the sandbox failed"):
        sandbox.run(Job("print(1)", [], ""), "", 5.0)
    assert script(sandbox, "print(1)").stdout == b"1\n"


OWNER = """
import sys
from penstock.shared.sandbox.plan import Job
from penstock.shared.sandbox.sandbox import Sandbox
from penstock.shared.config.rewards.scorers import CodeScorer
sandbox = Sandbox(CodeScorer(), [sys.argv[1]])
print(sandbox._process.pid, flush=True)
sandbox.run(Job("while True: pass", [], ""), "", 600.0)
"""


def test_program_dies_with_its_scorer_process(sandbox: Sandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, sandbox.mechanism], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        warden = int(owner.stdout.readline())

        def below() -> list[int]:
            first = children(warden)
            return first + [pid for child in first for pid in children(child)]

        eventually(lambda: len(below()) == (2 if sandbox.mechanism == "namespaces" else 1))
        running = [warden, *below()]
        owner.kill()
    eventually(lambda: not any(alive(pid) for pid in running))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


REFUSING = """
import json, os, sys
from penstock.shared.sandbox import kernel, seccomp
from penstock.shared.sandbox.sandbox import Sandbox
from penstock.shared.config.rewards.scorers import CodeScorer
from penstock.shared.errors import SandboxError

def refuse(numbers):
    code = [seccomp._op(seccomp._LOAD, seccomp._NUMBER_AT)]
    for number in numbers:
        code += [seccomp._op(seccomp._EQUAL, number, 0, 1), seccomp._refuse(1)]
    kernel.no_new_privileges()
    seccomp.install(b"".join([*code, seccomp._op(seccomp._RETURN, seccomp._ALLOW)]))

for numbers, max_processes in json.loads(sys.argv[1]):
    if os.fork() == 0:
        refuse(numbers)
        try:
            print(Sandbox(CodeScorer(max_processes=max_processes)).mechanism, flush=True)
        except SandboxError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_machine_that_cannot_contain_is_refused(family: Sandbox) -> None:
    """A filter blocks system calls, as containers do."""
    if landlock_version() == 0:
        pytest.skip("a machine with both mechanisms is needed")
    unshare, landlock = {"x86_64": (272, 444), "aarch64": (97, 444)}[os.uname().machine]
    cases = [[[unshare], 1], [[unshare], 2], [[unshare, landlock], 1], [[landlock], 1]]
    command = [sys.executable, "-c", REFUSING, json.dumps(cases)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert found[0] == "landlock"
    assert "no sandbox on this machine contains programs" in found[1]
    assert "max_processes above 1 needs namespaces" in found[1]
    assert "namespaces: unshare: Operation not permitted; landlock: this kernel has no Landlock" in found[2]
    assert found[3] == "namespaces"
