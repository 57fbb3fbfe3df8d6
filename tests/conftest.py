"""A real NATS server and a bus with all streams, and processes that are ranks, for every test that needs them."""

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
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # hundreds of interpreters start: one compiles for all of them
    sys.dont_write_bytecode = False
SHM, SHM_ROOM_BYTES = Path("/dev/shm"), 2 << 30
EXPERIENCE_BYTES, STREAM_BYTES = 64 << 20, 16 << 20
WORKERS, WORKER_BYTES = 3, 2 << 30
"""Processes that share the whole suite, and memory of one with what it starts. Two cores have room for three: many
tests wait for processes of their own, few need a core all the time. The long ones do: two of them share two cores."""
STACK_UNTIL, SLOW_UNTIL = 0.5, 0.8
"""Shares of the files by which those with tests of the shared stack, and the other slow ones, are over."""
SHARED_STACK = "stack"
ONLY = re.compile(r"(long|vllm)\b(?!.*\bor\b)")
"""Expressions of ``-m`` that select none but tests with that mark."""
NURSERY: pytest.StashKey[Any] = pytest.StashKey()
AFTER_STACK: pytest.StashKey[set[str]] = pytest.StashKey()
CLOSE_STACK: pytest.StashKey[Callable[[], None]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """The whole suite is without its long tests, unless the command line says which tests it wants."""
    if _whole_suite(config) and not config.option.markexpr and not config.option.keyword:
        config.option.markexpr = "not long"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite is shared out; tests that somebody names run in this process, where `-s` and `--pdb` work."""
    if not _whole_suite(config):
        return 0
    workers = WORKERS - 1 if config.option.markexpr.startswith("long") else WORKERS
    return max(1, min(workers, psutil.virtual_memory().available // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the processes that share the whole suite from one nursery, which forks their services and ranks, too."""
    if _whole_suite(config):
        config.stash[NURSERY] = nursery = module_beside("nursery").Nursery()
        nursery.start()
        for spec in specs:
            spec.python = spec.python or str(nursery.interpreter)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process that shares the suite where the nursery is."""
    if (nursery := node.config.stash.get(NURSERY, None)) is not None:
        node.workerinput["nursery"] = str(nursery.directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the nursery of all."""
    if (nursery := config.stash.get(NURSERY, None)) is not None:
        nursery.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without passes over what is there by then: they would find nothing to free."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without the mark where only tests that have it are wanted: to import all takes half a minute.

    No test gets its mark from another file: ``tests/repo/test_continuous_integration.py``.
    """
    wanted = ONLY.match(config.option.markexpr)
    if wanted is None or not collection_path.match("test_*.py"):
        return None
    return None if f"mark.{wanted[1]}" in collection_path.read_text(encoding="utf-8") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread files with slow tests, which mostly wait, among the others, which compute; the last fifth has none.

    Otherwise all workers would first wait and then compute, and in the end wait for the one that has the last file.
    Those that use the shared stack are in the first half: it is closed then, for it costs CPU time also while it idles.
    Tests that need a GPU are skipped where there is none.
    """
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not importlib.import_module("torch").cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip("no CUDA device here"))
    stack = {item.path for item in items if uses_stack(item)}
    slow = {item.path for item in items if item.get_closest_marker("slow")} - stack
    files = dict.fromkeys(item.path for item in items)
    place: dict[Path, float] = {}
    for share, some in ((STACK_UNTIL, stack), (SLOW_UNTIL, slow), (1.0, files.keys() - slow - stack)):
        own = [path for path in files if path in some]
        place |= {path: share * number / len(own) for number, path in enumerate(own)}
    items.sort(key=lambda item: place[item.path])


def uses_stack(item: pytest.Item) -> bool:
    """A test of the shared stack."""
    return SHARED_STACK in getattr(item, "fixturenames", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Close the shared stack of this process before the first test that comes after all that use it."""
    stash = item.config.stash
    if (close := stash.get(CLOSE_STACK, None)) is not None and item.nodeid in stash[AFTER_STACK]:
        del stash[CLOSE_STACK]
        close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which tests come after those of the shared stack; exempt what there is from garbage collection.

    Passes over all that was imported and collected took a third of the time.

    A ``CliRunner`` makes its command of an application once, not for each line: it has 77 of them, whose signatures
    take longer to read than most of them take to run.
    """
    if (testing := sys.modules.get("typer.testing")) is not None:
        testing._get_command = functools.cache(testing._get_command)  # type: ignore[attr-defined]
    last = max((number for number, item in enumerate(session.items) if uses_stack(item)), default=-1)
    session.config.stash[AFTER_STACK] = {item.nodeid for item in session.items[last + 1 :]}
    gc.collect()
    gc.freeze()


@pytest.fixture
def store_dir(tmp_path: Path) -> Iterator[Path]:
    """Where servers of this test keep their data: in memory where there is room, for then an fsync costs nothing."""
    if not SHM.is_dir() or shutil.disk_usage(SHM).free < SHM_ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir=SHM) as directory:
        yield Path(directory)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``disk(mib)`` is an empty file system of that size; the test is skipped where none can be mounted."""
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
    """Directory of a deployment of version 0.1.0, byte for byte as that version left it."""
    with tarfile.open(Path(__file__).parent / "contract" / "recorded" / "data-0.1.0.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.2 has none, and later versions warn without
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "recorded")
    return tmp_path / "recorded"


@pytest.fixture(scope="session")
def fill() -> Callable[[Path], Path]:
    """``fill(folder)`` leaves no room on the disk of a folder; returns the file that takes it."""

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
    """Bus time is the wall clock until the test measures it."""
    forget_bus_clock()
    yield
    forget_bus_clock()


@pytest.fixture
def nats_server(store_dir: Path) -> Iterator[NatsServer]:
    """A server of this test alone, so that it may be killed; starts in about 20 ms. Synced, as in production."""
    with NatsServer(store_dir / "nats") as server:
        yield server
        server.kill()  # an orderly end would take longer than the start, and nobody reads its store any more


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A connected bus; all streams and buckets exist."""
    async with await Bus.connect(nats_server.url, name="test") as connected:
        await connected.ensure_streams(experience_bytes=EXPERIENCE_BYTES, stream_bytes=STREAM_BYTES)
        yield connected


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> Iterator[Any]:
    """A ``Nursery``: forks services and ranks that need not import torch any more."""
    shared = getattr(pytestconfig, "workerinput", {}).get("nursery", "")
    found = module_beside("nursery").Nursery(shared)
    yield found
    found.close()


@pytest.fixture(scope="session")
def close_stack(pytestconfig: pytest.Config) -> Callable[[Callable[[], None]], None]:
    """``close_stack(close)``: have the shared stack closed as soon as no test of this process needs it any more."""
    return lambda close: pytestconfig.stash.__setitem__(CLOSE_STACK, close)


@pytest.fixture(scope="session")
def ranks(nursery: Any) -> Iterator[Any]:
    """A ``RankPool``: ``ranks.run(2, function, *args)`` calls ``function(world, *args)`` on two gloo ranks."""
    pool = module_beside("rank_pool").RankPool(nursery)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def chain() -> ModuleType:
    """``save_chain`` and ``running_stack`` of ``tests/contract/serving``: a policy whose words have one successor."""
    return module_beside("contract/serving/conftest")


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Path]:
    """The interpreter of a client; without one the test is skipped, or fails if PENSTOCK_REQUIRE_CLIENTS names it."""
    venvs = module_beside("clients/venvs")

    def find(name: str) -> Path:
        python: Path | None = venvs.python_of(name)
        if python is None:
            told = f"{name} has no environment; make clients-venvs CLIENTS={name}"
            if name in os.environ.get("PENSTOCK_REQUIRE_CLIENTS", "").split():
                pytest.fail(told)
            pytest.skip(told)
        return python

    return find


@pytest.fixture(scope="session")
def python_with() -> Callable[[str], Path]:
    """The interpreter of an engine; without one the test is skipped, or fails if PENSTOCK_REQUIRE_ENGINES names it."""

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
    """The file of that name in or below this folder."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, Path]:
    """An authority, and certificates of a server and a client that it signed, for 127.0.0.1; and another authority."""

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
