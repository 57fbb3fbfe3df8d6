"""Fixtures for all tests: a real NATS server, a bus with all streams, and processes that run as ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from penstock.local.engines import engine_python
from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.bus_clock import forget_bus_clock
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the models of the tests are small
os.environ.setdefault("PENSTOCK_OPEN_LOOPBACK", "true")  # tests that are about keys set them, or remove this
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # hundreds of interpreters start: the first one compiles for all
    sys.dont_write_bytecode = False
SHM, SHM_ROOM_BYTES = Path("/dev/shm"), 2 << 30
EXPERIENCE_BYTES, STREAM_BYTES = 64 << 20, 16 << 20
WORKERS, WORKER_BYTES = 3, 2 << 30
"""Number of pytest processes that share the whole suite, and the memory that one of them needs with the processes that
it starts. Two cores have room for three pytest processes: many tests wait for other processes, and few need a core all
the time. The long tests do need one: two pytest processes share two cores for them."""
STACK_UNTIL, SLOW_UNTIL = 0.5, 0.8
"""Fractions of the files after which all files with tests of the shared stack, and all other slow files, have run."""
SHARED_STACK = "stack"
ONLY = re.compile(r"(long|vllm)\b(?!.*\bor\b)")
"""Expressions of ``-m`` that select only tests with the mark that they name."""
NURSERY: pytest.StashKey[Any] = pytest.StashKey()
AFTER_STACK: pytest.StashKey[set[str]] = pytest.StashKey()
CLOSE_STACK: pytest.StashKey[Callable[[], None]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Leave the long tests out of a run of the whole suite, unless the command line selects tests."""
    if _whole_suite(config) and not config.option.markexpr and not config.option.keyword:
        config.option.markexpr = "not long"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in several processes, and named tests in this process, where `-s` and `--pdb` work."""
    if not _whole_suite(config):
        return 0
    workers = WORKERS - 1 if config.option.markexpr.startswith("long") else WORKERS
    return max(1, min(workers, psutil.virtual_memory().available // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the pytest processes that share the whole suite from one nursery, as it does their services and ranks."""
    if _whole_suite(config):
        config.stash[NURSERY] = nursery = module_beside("nursery").Nursery()
        nursery.start()
        for spec in specs:
            spec.python = spec.python or str(nursery.interpreter)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the directory of the nursery to a pytest process that runs a part of the suite."""
    if (nursery := node.config.stash.get(NURSERY, None)) is not None:
        node.workerinput["nursery"] = str(nursery.directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the nursery that all pytest processes shared."""
    if (nursery := config.stash.get(NURSERY, None)) is not None:
        nursery.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which would find nothing to free."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without the mark to which ``-m`` restricts the run, because importing all files takes half a minute.

    ``tests/repo/test_continuous_integration.py`` checks that no test gets its mark from another file.
    """
    wanted = ONLY.match(config.option.markexpr)
    if wanted is None or not collection_path.match("test_*.py"):
        return None
    return None if f"mark.{wanted[1]}" in collection_path.read_text(encoding="utf-8") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files with slow tests, which mostly wait, among those that compute; the last fifth has no slow test.

    Otherwise all workers would first wait and then compute, and at the end wait for the worker that has the last file.
    Files with tests of the shared stack come in the first half: the stack is closed after them, since it costs CPU time
    even while it idles. Tests that need a GPU are skipped on a machine without one.
    """
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not importlib.import_module("torch").cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip("no CUDA device here"))
    stack = {item.path for item in items if uses_stack(item)}
    slow = {item.path for item in items if item.get_closest_marker("slow")} - stack
    files = dict.fromkeys(item.path for item in items)
    position: dict[Path, float] = {}
    for share, some in ((STACK_UNTIL, stack), (SLOW_UNTIL, slow), (1.0, files.keys() - slow - stack)):
        own = [path for path in files if path in some]
        position |= {path: share * number / len(own) for number, path in enumerate(own)}
    items.sort(key=lambda item: position[item.path])


def uses_stack(item: pytest.Item) -> bool:
    """Return True if ``item`` is a test of the shared stack."""
    return SHARED_STACK in getattr(item, "fixturenames", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Close the shared stack of this process before the first test that runs after all tests of the stack."""
    stash = item.config.stash
    if (close := stash.get(CLOSE_STACK, None)) is not None and item.nodeid in stash[AFTER_STACK]:
        del stash[CLOSE_STACK]
        close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record which tests run after those of the shared stack, and exempt all present objects from garbage collection.

    Garbage collection of all imported and collected objects took a third of the time.

    Let ``CliRunner`` build the command tree of an application once, not for each invocation: the tree has 77 commands,
    and reading their signatures takes longer than running most of them.
    """
    if (testing := sys.modules.get("typer.testing")) is not None:
        testing._get_command = functools.cache(testing._get_command)  # type: ignore[attr-defined]
    last = max((number for number, item in enumerate(session.items) if uses_stack(item)), default=-1)
    session.config.stash[AFTER_STACK] = {item.nodeid for item in session.items[last + 1 :]}
    gc.collect()
    gc.freeze()


@pytest.fixture
def store_dir(tmp_path: Path) -> Iterator[Path]:
    """Directory for the data of this test's servers: in memory where there is room, because an fsync is free there."""
    if not SHM.is_dir() or shutil.disk_usage(SHM).free < SHM_ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir=SHM) as directory:
        yield Path(directory)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``disk(mib)`` mounts an empty file system of that size and returns its path; skips the test if mounting fails."""
    mounted: list[Path] = []

    def mount(mib: int, folder: Path = tmp_path / "disk") -> Path:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "tmpfs", str(folder)]
        try:
            subprocess.run(command, capture_output=True, check=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', error)}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Data directory of a deployment of version 0.1.0, byte for byte as that version left it."""
    with tarfile.open(Path(__file__).parent / "contract" / "recorded" / "data-0.1.0.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.2 has no filters, and later versions warn if none is set
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "recorded")
    return tmp_path / "recorded"


@pytest.fixture(scope="session")
def fill() -> Callable[[Path], Path]:
    """``fill(folder)`` writes a file that fills the disk of ``folder``, and returns the path of that file."""

    def fill(folder: Path) -> Path:
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        return ballast

    return fill


@pytest.fixture(autouse=True)
def _wall_clock() -> Iterator[None]:
    """Reset bus time to the wall clock before and after each test, so that only a test that measures it changes it."""
    forget_bus_clock()
    yield
    forget_bus_clock()


@pytest.fixture
def nats_server(store_dir: Path) -> Iterator[NatsServer]:
    """NATS server of this test alone, which it may kill. Syncs each write, as in production; starts in about 20 ms."""
    with NatsServer(store_dir / "nats") as server:
        yield server
        server.kill()  # a clean shutdown would take longer than the start, and nobody reads the store any more


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A connected bus on which all streams and buckets exist."""
    async with await Bus.connect(nats_server.url, name="test") as connected:
        await connected.ensure_streams(experience_bytes=EXPERIENCE_BYTES, stream_bytes=STREAM_BYTES)
        yield connected


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> Iterator[Any]:
    """A ``Nursery``, which forks services and ranks with torch already imported."""
    shared = getattr(pytestconfig, "workerinput", {}).get("nursery", "")
    found = module_beside("nursery").Nursery(shared)
    yield found
    found.close()


@pytest.fixture(scope="session")
def close_stack(pytestconfig: pytest.Config) -> Callable[[Callable[[], None]], None]:
    """``close_stack(close)`` has ``close`` called as soon as no later test of this process needs the shared stack."""
    return lambda close: pytestconfig.stash.__setitem__(CLOSE_STACK, close)


@pytest.fixture(scope="session")
def ranks(nursery: Any) -> Iterator[Any]:
    """A ``RankPool``: for example, ``ranks.run(2, f, *args)`` calls ``f(world, *args)`` on two gloo ranks."""
    pool = module_beside("rank_pool").RankPool(nursery)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def chain() -> ModuleType:
    """Module with ``save_chain`` and ``running_stack``, for a policy in which each word has exactly one successor."""
    return module_beside("contract/serving/conftest")


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Path]:
    """``python_of(client)``: its interpreter, or a skip, or a failure if PENSTOCK_REQUIRE_CLIENTS names it."""
    venvs = module_beside("clients/venvs")

    def find(name: str) -> Path:
        python: Path | None = venvs.python_of(name)
        if python is None:
            message = f"{name} has no environment; make clients-venvs CLIENTS={name}"
            if name in os.environ.get("PENSTOCK_REQUIRE_CLIENTS", "").split():
                pytest.fail(message)
            pytest.skip(message)
        return python

    return find


@pytest.fixture(scope="session")
def python_with() -> Callable[[str], Path]:
    """``python_with(engine)``: its interpreter, or a skip, or a failure if PENSTOCK_REQUIRE_ENGINES names it."""

    def find(name: str) -> Path:
        try:
            return engine_python(name, load_settings().engines_dir)
        except ConfigError as error:
            if name in os.environ.get("PENSTOCK_REQUIRE_ENGINES", "").split():
                pytest.fail(str(error))
            pytest.skip(str(error))

    return find


def _whole_suite(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def module_beside(name: str) -> ModuleType:
    """Import ``name``.py, a path relative to this folder, and return the module."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, Path]:
    """PEM files by name: a CA, server and client certificates that it signed for 127.0.0.1, and another CA."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")  # fmt: skip
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-out", f"{name}.pem", "-extfile", "names")  # fmt: skip
    return {path.name: path for path in tmp_path.iterdir() if path.suffix in (".pem", ".key")}
