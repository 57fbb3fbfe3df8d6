"""Engines under test, each over a small peaked model, and the plain forward that judges their log-probs.

``PENSTOCK_TEST_ENGINE`` names the engine. Without it, the tests of the contract run on the embedded engine and on the
engine `transformers`, which serves an architecture that the embedded one refuses. Each test creates its own engine in
this process, or engine of a user's class (``module:Class``). An engine with processes of its own takes too long to
start: all tests of a run share one, in its own interpreter (``run_contract`` starts such a run).
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from penstock.services.rollout.engines import (
    EmbeddedEngine,
    Engine,
    TransformersEngine,
    UpdatableByReference,
    UpdateMode,
)
from penstock.services.rollout.engines.adapter import EngineAdapter, ModelFiles
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.config.rollout import ClassConfig, SglangConfig, VllmConfig, VllmServerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.weights import layout_of, open_publisher
from penstock.shared.weights.open import Publisher
from penstock.shared.weights.pinned import PinnedCopies
from penstock.shared.weights.slots import slot_paths
from tests.contract.device_memories import LateStream

JOB = "job_engines"
OWN = os.environ.get("PENSTOCK_TEST_ENGINE", "embedded")
ARCHITECTURE = ArchitectureConfig(
    hidden_size=32 if OWN == "embedded" else 64,  # vLLM's attention on a CPU wants heads of 32 at least
    intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
)  # fmt: skip
CONFIG = ModelConfig(config=ARCHITECTURE, tokenizer="char")
EOS = 2
DEVICE = os.environ.get("PENSTOCK_TEST_DEVICE", "cuda")
"""Device of SGLang; the stand-in for it accepts the options that are for a GPU."""
MAX_RUNNING = 12
LENGTH = 240
PROMPT = (5, 14, 9, 18)


def peaked_model(seed: int, foreign: bool = False) -> PreTrainedModel:
    """Return a model of random weights with confident predictions: a wrong cache moves log-probs by nats.

    ``foreign``: of an architecture that our own decoder does not know.
    """
    tokenizer = build_tokenizer(CONFIG)
    if foreign:
        size = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)).eval()
    else:
        model = build_model(CONFIG, len(tokenizer), seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3, generator=noise)
    return model


@functools.cache
def reference(seed: int, foreign: bool = False) -> PreTrainedModel:
    """Return a copy of ``peaked_model(seed, foreign)`` that no engine changes."""
    return peaked_model(seed, foreign)


@dataclass(frozen=True)
class Bench:
    """A started engine that serves ``peaked_model(0)`` as version 0, with helpers for requests and updates."""

    engine: Engine
    prompt: tuple[int, ...] = PROMPT
    eos: int = EOS
    max_running: int = MAX_RUNNING
    length: int = LENGTH
    seeded: bool = True
    """False if seeds have no effect: SGLang's deterministic inference needs the attention kernels of a GPU."""
    foreign: bool = False
    """True if the engine serves ``peaked_model(0, foreign=True)``."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digests of the versions that ``update`` loaded."""

    @property
    def repeatable(self) -> dict[str, float]:
        """Return the sampling with which the same request gets the same tokens: greedy if seeds have no effect."""
        return {} if self.seeded else {"temperature": 0.0}

    def ask(self, id: str, *, prompt: Sequence[int] = PROMPT, n: int = 1, **sampling: object) -> GenRequest:
        """Return a request for 240 tokens that does not stop early, unless ``sampling`` changes that."""
        wanted = {"max_new_tokens": LENGTH, "ignore_eos": True, "seed": 7, **sampling}
        return GenRequest(request_id=id, prompt_ids=list(prompt), n=n, sampling=Sampling(**wanted))

    @torch.no_grad()
    def error(
        self, sample: Sample, *, prompt: Sequence[int] = PROMPT, temperature: float = 1.0, seeds: Sequence[int] = (0,)
    ) -> float:
        """Return the largest deviation of a sample's log-probs from a plain forward of the version of each span.

        ``seeds[v]`` is the seed of the weights of version v.
        """
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        worst = 0.0
        for span in sample.spans:
            logits = reference(seeds[span.version], self.foreign)(ids).logits[0].float() / (temperature or 1.0)
            start, stop = len(prompt) + span.start, len(prompt) + span.end
            expected = torch.log_softmax(logits[start - 1 : stop - 1], -1).gather(-1, ids[0, start:stop, None])[:, 0]
            away = (expected - torch.tensor(sample.logprobs[span.start : span.end])).abs()
            worst = max(worst, float(away.nan_to_num(nan=torch.inf).max()))
        return worst

    @torch.no_grad()
    def plain(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-probs [T, V] after each token of a text, from a forward of version 0 without a cache."""
        return torch.log_softmax(reference(0, self.foreign)(torch.tensor([list(token_ids)])).logits[0].float(), -1)

    def weights(self, seed: int) -> dict[str, Tensor]:
        """Return the parameters of ``peaked_model(seed)``."""
        named = reference(seed, self.foreign).named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}

    async def until_tokens(self, num_new: int) -> None:
        """Wait until the engine has sampled ``num_new`` more tokens."""
        goal = self.engine.generated_tokens + num_new
        async with asyncio.timeout(60):
            while self.engine.generated_tokens < goal:
                await asyncio.sleep(0.001)

    async def fail_half_way(self, update: Callable[[], Awaitable[object]], match: str) -> None:
        """Check an update that fails half-way: running requests end, and none is served until a full update."""
        asking = asyncio.create_task(self.engine.generate(self.ask("cut")))
        await self.until_tokens(20)
        with pytest.raises(WeightsError, match=match):
            await update()
        cut = (await asking).samples[0]
        assert cut.finish == "abort"
        assert self.error(cut) < 1e-4
        assert (await self.engine.weight_info()).dirty
        with pytest.raises(WeightsError, match="dirty"):
            await self.engine.generate(self.ask("refused"))
        await self.update(2, seed=2)
        clean = (await self.engine.generate(self.ask("clean", max_new_tokens=30))).samples[0]
        assert [span.version for span in clean.spans] == [2]
        assert self.error(clean, seeds=(0, 1, 2)) < 1e-4

    async def until_unavailable(self, asking: asyncio.Task[Any]) -> None:
        """Wait until a request and the engine have failed, for 120 s at most."""
        async with asyncio.timeout(120):
            with pytest.raises(Unavailable):
                await asking
            with pytest.raises(Unavailable):
                while True:
                    await self.engine.health()
                    await asyncio.sleep(0.05)

    async def update(
        self,
        version: int,
        *,
        seed: int,
        mode: UpdateMode = "swap",
        guard: Callable[[], bool] | None = None,
        digest: str = "",
    ) -> float:
        """Update all weights to those of ``peaked_model(seed)``; return the pause in seconds."""
        self.digests[version] = digest or f"d{version}"
        await self.engine.begin_update(version=version, digest=self.digests[version], mode=mode, guard=guard)
        tensors = self.weights(seed)
        half = len(tensors) // 2
        await self.engine.load_chunk(dict(list(tensors.items())[:half]))
        await self.engine.load_chunk(dict(list(tensors.items())[half:]))
        return await self.engine.commit_update()


@dataclass(frozen=True)
class ReferenceBench(Bench):
    """A bench of an engine whose processes open versions themselves, from slots with the same weights."""

    publisher: Publisher = field(kw_only=True)

    def publish(self, version: int, seed: int) -> WeightManifest:
        """Publish the parameters of ``peaked_model(seed)`` in a slot; return the manifest."""
        return self.publisher.publish(self.weights(seed).items(), version=version, epoch=1)

    async def update(
        self,
        version: int,
        *,
        seed: int,
        mode: UpdateMode = "swap",
        guard: Callable[[], bool] | None = None,
        digest: str = "",
    ) -> float:
        """Update all weights to those of ``peaked_model(seed)``; the digest is that of the published bytes."""
        assert guard is None
        assert not digest
        manifest = await asyncio.to_thread(self.publish, version, seed)
        self.digests[version] = manifest.digest
        await cast(UpdatableByReference, self.engine).stage(manifest, None)
        await self.engine.begin_update(version=version, digest=manifest.digest, mode="in_place")
        return await self.engine.commit_update()


HERE = Path(__file__).parent
SHARED = (
    "test_engine_control.py", "test_engine_updates.py", "test_engine_commits.py", "test_engine_begun.py",
    "test_engine_generate.py",
)  # fmt: skip
IN_THIS_PROCESS: dict[str, type[EmbeddedEngine]] = {"embedded": EmbeddedEngine, "transformers": TransformersEngine}
"""Engines of this process by name; ``SHARED`` and the tests of streams run on each."""
LATE, ON_GPU = "embedded with copies on a late stream", "embedded on a GPU"
COPYING = (LATE, pytest.param(ON_GPU, marks=pytest.mark.gpu))
"""Embedded engines that copy weights to a device before they swap; the tests of updates run on each."""
ENDING = "test_engine_control.py::test_resume_and_close_are_safe_to_repeat"
"""A test that ends the engine, which takes long to start; other tests that end it run last."""


@pytest.fixture
def run_contract(tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs the contract of an engine with processes of its own, in another pytest process.

    ``run(engine, python, files, environment, without=(), limit_s=...)``: ``files`` are run after the shared ones,
    ``environment`` extends that of this process, the tests ``without`` are left out.
    """

    def run(
        engine: str, python: Path, files: Sequence[str], environment: Mapping[str, str], *, without: Sequence[str] = (),
        limit_s: int,
    ) -> None:  # fmt: skip
        settings = (
            "addopts=", "filterwarnings=", "timeout=600", "asyncio_default_fixture_loop_scope=session",
            "asyncio_default_test_loop_scope=session",
        )  # fmt: skip
        root = HERE.parents[2]
        command = [str(python), "-m", "pytest", "-ra", "--tb=short", "--import-mode=importlib"]
        command += [word for setting in settings for word in ("-o", setting)]
        command += ["-p", "no:cacheprovider", *(str(HERE / name) for name in (*SHARED, *files))]
        left_out = (str((HERE / name).relative_to(root)) for name in (ENDING, *without))
        command += [word for name in left_out for word in ("--deselect", name)]
        log = tmp_path / "pytest.log"
        with log.open("wb") as output:
            result = subprocess.run(
                command, cwd=root, env={**os.environ, "PENSTOCK_TEST_ENGINE": engine, **environment}, stdout=output,
                stderr=output, timeout=limit_s, check=False,
            )  # fmt: skip
        assert result.returncode == 0, "\n".join(log.read_text(errors="replace").splitlines()[-80:])

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of the contract on each engine of this process."""
    of_contract = metafunc.definition.path.name in (*SHARED, "test_engine_streams.py")
    if OWN == "embedded" and of_contract and "bench" in metafunc.fixturenames:
        updates = metafunc.definition.path.name == "test_engine_updates.py"
        metafunc.parametrize("bench", [*IN_THIS_PROCESS, *(COPYING if updates else ())], indirect=True)


def in_this_process(name: str, **options: Any) -> EmbeddedEngine:
    """Return an engine of ``IN_THIS_PROCESS`` or ``COPYING``; ``options`` are further arguments of its class."""
    tokenizer, model = build_tokenizer(CONFIG), peaked_model(0, foreign=name == "transformers")
    kind = IN_THIS_PROCESS.get(name, EmbeddedEngine)
    if name == LATE:
        options = {"copies": PinnedCopies(LateStream(), buffer_bytes=4096), **options}
    elif name == ON_GPU:
        model = model.to(torch.device("cuda", torch.cuda.current_device()))
    return kind(model, max_running=MAX_RUNNING, stop_ids=[EOS], detokenize=tokenizer.decode, **options)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread, because tests share the machine; results do not depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    """Return settings with a directory for slots of this run."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "shm").mkdir()
    return ServiceSettings(shm_dir=folder / "shm", data_dir=folder, host_id="here", worker_id="rollout-0")


def files_of(folder: Path, **options: Any) -> ModelFiles:
    """Save ``peaked_model(0)`` and its tokenizer in a directory; return their description."""
    tokenizer, model = build_tokenizer(CONFIG), peaked_model(0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelFiles(
        path=folder, tokenizer=folder, dtype="float32", vocab_size=len(tokenizer), max_length=512,
        layout=layout_of(model.named_parameters()), **options,
    )  # fmt: skip


def adapter(kind: type[EngineAdapter[Any, Any]], config: Any, settings: ServiceSettings, **options: Any) -> Engine:
    """Return an engine of class ``kind`` on the directory of a model."""
    return kind(
        files_of(settings.data_dir / "model", **options), config, settings, max_running=MAX_RUNNING, stop_ids=[EOS],
        detokenize=build_tokenizer(CONFIG).decode,
    )  # fmt: skip


def vllm(settings: ServiceSettings) -> Engine:
    """Return an engine that runs vLLM in its processes."""
    from penstock.services.rollout.engines.vllm.engine import VllmEngine

    return adapter(VllmEngine, VllmConfig(kv_cache_gib=0.25), settings)


def vllm_server(settings: ServiceSettings) -> Engine:
    """Return an engine that uses vLLM's HTTP server."""
    from penstock.services.rollout.engines.vllm.server import VllmServerEngine

    return adapter(VllmServerEngine, VllmServerConfig(kv_cache_gib=0.25), settings)


def sglang(settings: ServiceSettings) -> Engine:
    """Return an engine that uses SGLang on the device PENSTOCK_TEST_DEVICE."""
    from penstock.services.rollout.engines.sglang.engine import SglangEngine

    return adapter(SglangEngine, SglangConfig(), settings, device=DEVICE)


def of_class(settings: ServiceSettings) -> Engine:
    """Return an engine of the class that PENSTOCK_TEST_ENGINE names."""
    found = import_named(OWN, what="PENSTOCK_TEST_ENGINE", beside="rollout", error=ConfigError)
    return adapter(found, ClassConfig(path=OWN), settings)


OUTSIDE = {"vllm": vllm, "vllm_server": vllm_server, "sglang": sglang}
IN_PROCESS = ":" in OWN
"""True if the engine is a class of which each test creates an instance."""
_shared: list[Engine] = []
"""The engine of the run, once it is started."""


@pytest.fixture
def holders(settings: ServiceSettings) -> Callable[[], set[int]]:
    """Return a function that finds the processes that hold the lock of a slot."""

    def find() -> set[int]:
        found: set[int] = set()
        for path in slot_paths(settings.shm_dir, JOB):
            file = LockedFile.open(path)
            found.update(file.holders())
            file.close()
        return found

    return find


@pytest.fixture
def by_tensors(bench: Bench) -> None:
    """Skip the test for engines that open versions themselves."""
    if bench.engine.caps.staging != "tensors":
        pytest.skip("this engine opens versions by itself")


@pytest.fixture
def elsewhere() -> None:
    """Skip the test for engines in this process: it needs processes that open versions and share prefixes."""
    if IN_PROCESS:
        pytest.skip("this engine is in this process")


@pytest.fixture
async def bench(request: pytest.FixtureRequest, one_thread: None, settings: ServiceSettings) -> AsyncIterator[Bench]:
    """Yield the bench of this run's engine, which is started and serves version 0."""
    if OWN == "embedded":
        name = getattr(request, "param", OWN)
        engine = in_this_process(name)
        await engine.start()
        yield Bench(engine, foreign=name == "transformers")
        await engine.close()
        return
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("mode") == "swap":
        pytest.skip("this engine copies in place")
    if not _shared:
        engine = of_class(settings) if IN_PROCESS else OUTSIDE[OWN](settings)
        await engine.start()
        _shared.append(engine)
    publisher = open_publisher(JOB, layout_of(peaked_model(0).named_parameters()), settings)
    found = ReferenceBench(_shared[0], publisher=publisher, seeded=(OWN, DEVICE) != ("sglang", "cpu"))
    await found.update(0, seed=0)
    yield found
    if IN_PROCESS:
        await _shared.pop().close()
        publisher.close()
        return
    try:
        await found.engine.health()
    except Unavailable:
        await _shared.pop().close()
    else:
        await found.engine.resume()
        await found.engine.abort()
    publisher.close()
