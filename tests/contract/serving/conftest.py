"""A gateway behind HTTP, a bus, and rollout sessions over a model with known answers: all real, in one process.

The model is a chain: each word has one successor, with a log-prob of almost 0, except after ``?``, where all words are
about equally likely.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import string
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
import uvicorn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from penstock.services.coordinator.api import create_app
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import build_services
from penstock.services.coordinator.serving import Gateway
from penstock.services.coordinator.webserver import KEEP_ALIVE_S
from penstock.services.rollout.session import RolloutSession
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.models.building import building
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.live.interaction import Interaction
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer
from penstock.shared.weights import layout_of, open_publisher

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CHAINS = {
    "hi": ["hello", " wor", "ld", " and", " more", "<eos>"],
    "tool": ["I call", "\n<tool_call>", CALL, "</tool_call>", "<eos>"],
    "bad": ["<tool_call>{broken", "</tool_call>", "<eos>"],
    "again": ["la", "la"],
    "?": [],
}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
WORDS = [*SPECIAL, *dict.fromkeys(w for first, rest in CHAINS.items() for w in (first, *rest) if w not in SPECIAL)]
HIDDEN = 32
FREE = "?"


def successors() -> dict[str, str]:
    found = {}
    for first, rest in CHAINS.items():
        for word, following in zip([first, *rest], rest, strict=False):
            found[word] = following
    return found


def save_chain(folder: Path, *, away: bool = False) -> None:
    """Save the model and its tokenizer. With ``away``, the end of the answer follows every word."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    pattern = "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "tokenizer")
    assert len(WORDS) <= HIDDEN
    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    following = successors()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(HIDDEN)[: len(WORDS)])
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for place, word in enumerate(WORDS):
            if word != FREE:
                follower = "<eos>" if away else following.get(word, "<eos>")
                model.lm_head.weight[WORDS.index(follower), place] = 10.0
    model.save_pretrained(folder)


def save_characters(folder: Path) -> None:
    """Save a model of random weights that generates characters, and its tokenizer."""
    config = ModelConfig(
        config=ArchitectureConfig(
            arch="qwen2", hidden_size=HIDDEN, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1,
            max_position_embeddings=2048, tie_word_embeddings=False,
        ),
        tokenizer="char", characters=string.printable,
    )  # fmt: skip
    tokenizer = build_tokenizer(config)
    build_model(config, len(tokenizer), seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder / "tokenizer")


@dataclass
class Stack:
    """A served job: HTTP ``client``, gateway, bus and rollout sessions."""

    bus: Bus
    url: str
    client: httpx.AsyncClient
    gateway: Gateway
    job: str
    settings: ServiceSettings
    record: JobRecord
    publisher: Any
    server: NatsServer
    gateway_task: asyncio.Task[None]
    sessions: list[asyncio.Task[None]] = field(default_factory=list)
    rollouts: list[RolloutSession] = field(default_factory=list)

    @asynccontextmanager
    async def replica(self, **more: Any) -> AsyncIterator[Front]:
        """Run the front of another coordinator, with its own connection to the bus."""
        settings = self.settings.model_copy(update={"worker_id": "api-1", **more})
        async with await Bus.connect(self.server.url, name="api-1") as bus, running_front(bus, settings) as front:
            yield front

    async def interactions(self) -> list[Interaction]:
        """Return all records, in the order in which they became durable."""
        messages = await self.bus.read(subjects.INTERACTIONS, subjects.interactions(self.job))
        return [unpack(message.data, Interaction)[0] for message in messages]

    async def recorded(self, id: str) -> Interaction:
        """Return the record of an interaction."""
        message = await self.bus.last(subjects.INTERACTIONS, subjects.interaction(self.job, id))
        assert message is not None
        return unpack(message.data, Interaction)[0]

    async def chat(self, content: str, *, client: httpx.AsyncClient | None = None, **more: Any) -> httpx.Response:
        """Send a chat of one message, through the ``client`` of another front if it is given."""
        headers = more.pop("headers", {})
        path = more.pop("path", "/v1/chat/completions")
        body = {"model": "agent", "messages": [{"role": "user", "content": content}], "max_tokens": 16, **more}
        return await (client or self.client).post(path, json=body, headers=headers)

    def add_worker(self, name: str) -> asyncio.Task[None]:
        """Start another rollout worker; return its task."""
        settings = self.settings.model_copy(update={"worker_id": name})
        session = RolloutSession(self.bus, settings, self.job, parse_training(self.record.spec))
        self.rollouts.append(session)
        self.sessions.append(asyncio.create_task(session.run()))
        return self.sessions[-1]

    async def publish(self, version: int, *, away: bool = False, candidate: bool = False) -> None:
        """Publish a policy version: the chain, or with ``away`` the model that ends every answer.

        A ``candidate`` is published beside the served version.
        """
        folder = self.settings.data_dir / "away" if away else self.settings.data_dir / "model"
        if away and not folder.exists():
            save_chain(folder, away=True)
        with building():  # workers may be loading theirs
            tensors = list(Qwen2ForCausalLM.from_pretrained(folder).named_parameters())
        publisher = self.publisher(tensors)
        kv, key, keep = self.bus.kv(subjects.MANIFESTS), self.job, None
        if candidate and (entry := await kv.get(self.job)) is not None and entry.value is not None:
            key, keep = subjects.candidate_manifest(self.job), unpack(entry.value, WeightManifest)[0]
        manifest = await asyncio.to_thread(publisher.publish, tensors, version=version, epoch=1, keep=keep)
        await kv.put(key, pack(manifest, job=self.job))

    async def serving(self, version: int) -> None:
        """Wait until every worker serves a version."""
        async with asyncio.timeout(60):
            while not all(session.status()["version"] == version for session in self.rollouts):
                await asyncio.sleep(0.01)


@dataclass
class Front:
    """A coordinator's parts for live requests: its HTTP server, its gateway and its feedback service."""

    url: str
    client: httpx.AsyncClient
    gateway: Gateway
    service: FeedbackService
    running: list[asyncio.Task[None]]
    """Tasks of the gateway and of the feedback service."""

    async def die(self) -> None:
        """Stop as by SIGKILL, without notice to other processes."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


def consent_of(user: str) -> bool | None:
    """Return the consent of a user: False if the name contains ``no``, True if ``yes``, else None."""
    return False if "no" in user else True if "yes" in user else None


@asynccontextmanager
async def running_front(bus: Bus, settings: ServiceSettings) -> AsyncIterator[Front]:
    """Run the front of a coordinator on the bus."""
    store = JobStore(bus)
    gateway = Gateway(bus, settings.worker_id, pseudonym=lambda user: user and f"p-{user}", consent_of=consent_of)
    service = FeedbackService(bus, store, settings.data_dir / settings.worker_id)
    services = build_services(bus, store, Members(), {}, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(services, feedback_service=service, serving=gateway)
    http = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, timeout_keep_alive=KEEP_ALIVE_S)
    )
    http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(http._serve([listener]))
    running = [asyncio.create_task(gateway.run()), asyncio.create_task(service.run())]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    key = {"authorization": f"Bearer {settings.api_keys}"} if settings.api_keys else {}
    client = httpx.AsyncClient(base_url=url, timeout=60, headers=key, verify=False)
    front = Front(url, client, gateway, service, running)
    try:
        async with front.client:
            async with asyncio.timeout(60):
                while not http.started or (await front.client.get("/v1/models")).status_code != 200:
                    await asyncio.sleep(0.02)
            yield front
    finally:
        http.should_exit = True
        await serving
        await front.die()


@asynccontextmanager
async def running_stack(
    directory: Path, *, save: Callable[[Path], None] = save_chain, **online: Any
) -> AsyncIterator[Stack]:
    """Run a stack whose one rollout worker serves version 0 of the job `agent`, a model that ``save`` writes."""
    save(directory / "model")
    settings = ServiceSettings(
        worker_id="api-0", host_id="test", data_dir=directory, shm_dir=directory, rate_limit="100000/minute",
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer(directory / "nats"))
        stack.callback(server.kill)
        bus = await stack.enter_async_context(await Bus.connect(server.url, name="test"))
        await bus.ensure_streams(experience_bytes=64 << 20, stream_bytes=16 << 20)
        store = JobStore(bus)
        record = await store.create(
            parse_training(
                {
                    "kind": "online_rl",
                    "name": "agent",
                    "model": {"path": str(directory / "model"), "tokenizer": str(directory / "model" / "tokenizer")},
                    "sampling": {"max_new_tokens": 32},
                    "placement": {"max_running": 8},
                    "online": {"hold_s": 10.0, **online},
                }
            )
        )
        publishers: list[Any] = []

        def publisher(tensors: Any) -> Any:
            if not publishers:
                publishers.append(open_publisher(record.id, layout_of(tensors), settings))
                stack.callback(publishers[0].close)
            return publishers[0]

        front = await stack.enter_async_context(running_front(bus, settings))
        served = Stack(
            bus, front.url, front.client, front.gateway, record.id, settings, record, publisher, server,
            front.running[0],
        )  # fmt: skip
        await served.publish(0)
        served.add_worker("rollout-0")
        try:
            yield served
        finally:
            for task in served.sessions:
                task.cancel()
            await asyncio.gather(*served.sessions, return_exceptions=True)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Yield a directory, in memory where the machine allows it, because an fsync costs nothing there."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir=shm if shm.is_dir() else None) as directory:
        yield Path(directory)
        shutil.rmtree(directory, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(memory: Path) -> AsyncIterator[Stack]:
    """Run one stack for all tests of a module that leave it as it was."""
    async with running_stack(memory) as stack:
        yield stack


@pytest.fixture
def stack_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs a stack for one test: ``async with stack_of(hold_s=1) as stack``."""
    return lambda **online: running_stack(tmp_path_factory.mktemp("stack"), **online)


@pytest.fixture
def writer_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Do as ``stack_of``, with a model that may generate any text."""
    return lambda **online: running_stack(tmp_path_factory.mktemp("stack"), save=save_characters, **online)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writer(memory: Path) -> AsyncIterator[Stack]:
    """Do as ``agent``, with a model that may generate any text."""
    async with running_stack(memory, save=save_characters) as stack:
        yield stack
