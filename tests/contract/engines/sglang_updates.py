"""Versions that a server reads from files, and the answers of the server; these tests run after the contract."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.services.rollout.engines.servers.client import EngineServer
from penstock.services.rollout.engines.sglang import files as sglang_files
from penstock.services.rollout.engines.sglang.engine import SglangEngine
from penstock.shared.config.rollout import SglangConfig
from penstock.shared.errors import Unavailable, WeightsError
from penstock.shared.protocol.generation import Token, WeightInfo
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.weights import layout_of, open_publisher
from tests.processes import is_alive

CHECK = "penstock.services.rollout.engines.adapter.check_layout"
LONG = tuple(5 + i % 40 for i in range(200))
ON_GPU = ("--enable-deterministic-inference",)
ON_CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--disable-overlap-schedule", "--max-total-tokens", "4096",
)  # fmt: skip


async def completion(bench: Any, name: str, **sampling: Any) -> Any:
    request = bench.ask(name, **{"max_new_tokens": 30, **sampling})
    return (await bench.engine.generate(request)).samples[0]


@pytest.fixture
def asked(bench: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Return a list that collects the path and body of each POST to the server from now on."""
    found: list[tuple[str, dict[str, Any]]] = []
    post = bench.engine._post

    async def noted(path: str, body: dict[str, Any], *rest: Any) -> Any:
        found.append((path, body))
        return await post(path, body, *rest)

    monkeypatch.setattr(bench.engine, "_post", noted)
    return found


async def test_an_update_retracts_and_drops_caches(bench: Any, asked: list[tuple[str, dict[str, Any]]]) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("crossing")))
    await bench.until_tokens(20)
    await bench.update(1, seed=1)
    assert [path for path, _ in asked] == [
        "/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation",
    ]  # fmt: skip
    bodies = dict(asked)
    assert bodies["/pause_generation"] == {"mode": "retract"}, "in_place would keep old keys and values"
    assert bodies["/update_weights_from_disk"]["flush_cache"] is True
    assert bodies["/update_weights_from_disk"]["weight_version"] == f"1:{bench.digests[1][:16]}"
    assert [span.version for span in (await task).samples[0].spans] == [0, 1]


async def test_a_cache_that_is_not_dropped_would_be_seen(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that without the flush the label is right and the log-probs are wrong."""
    post = bench.engine._post

    async def keeping(path: str, body: dict[str, Any], *rest: Any) -> Any:
        if path == "/flush_cache":
            return {}
        if path == "/update_weights_from_disk":
            body = {**body, "flush_cache": False}
        return await post(path, body, *rest)

    await completion(bench, "before", prompt=LONG)
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "_post", keeping)
        await bench.update(1, seed=1)
    sample = await completion(bench, "stale", prompt=LONG)
    assert [span.version for span in sample.spans] == [1]
    assert bench.error(sample, prompt=LONG, seeds=(0, 1)) > 0.1


async def test_a_flush_that_is_refused_makes_the_engine_dirty(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    post = bench.engine._post

    async def refused(path: str, body: dict[str, Any], *rest: Any) -> Any:
        return await post("/no_such_route" if path == "/flush_cache" else path, body, *rest)

    async def half_way() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine, "_post", refused)
            await bench.update(1, seed=1)

    await bench.fail_half_way(half_way, "could not drop its caches")


async def test_a_staged_version_is_a_file_until_its_update_ends(bench: Any, settings: Any) -> None:
    manifest = await asyncio.to_thread(bench.publish, 1, 1)
    way = await bench.engine.stage(manifest, None)
    assert (way.transport, way.fetched_bytes) == ("shm", 0)
    assert len(files(settings)) == 1
    await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    await bench.engine.abort_update()
    await bench.engine.abort_update()
    assert files(settings) == []
    with pytest.raises(WeightsError, match="not staged"):
        await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    assert not (await bench.engine.weight_info()).dirty
    await bench.update(1, seed=1)
    assert files(settings) == []


def files(settings: Any) -> list[Path]:
    return list(settings.shm_dir.glob("penstock-sglang-*/*/model.safetensors"))


async def test_a_file_that_is_not_what_was_announced_is_refused(
    bench: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = sglang_files.save_file

    def damaged(tensors: Any, path: Path, **options: Any) -> None:
        save(tensors, path, **options)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))

    manifest = await asyncio.to_thread(bench.publish, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(sglang_files, "save_file", damaged)
        with pytest.raises(WeightsError, match="damaged"):
            await bench.engine.stage(manifest, None)
    assert files(settings) == []
    assert await bench.engine.weight_info() == WeightInfo(version=0, digest=bench.digests[0], dirty=False)


@pytest.fixture
async def joined(bench: Any, settings: Any) -> AsyncIterator[Callable[[], SglangEngine]]:
    """Yield a function that creates engines on a running server whose weights have another label.

    The events of this server repeat earlier tokens.
    """
    model = bench.engine.model
    words = [
        "-m", "sglang.launch_server",
        "--model-path", str(model.path), "--tokenizer-path", str(model.tokenizer), "--dtype", "float32",
        "--context-length", "512", "--max-running-requests", "8", "--weight-version", "default",
        "--log-level", "warning", "--skip-server-warmup", *(ON_CPU if model.device == "cpu" else ON_GPU),
    ]  # fmt: skip
    server = await EngineServer.start("SGLang", settings.sglang_interpreter, words, bench.engine._variables())
    await server.ready("/server_info")
    created: list[SglangEngine] = []

    def make() -> SglangEngine:
        engine = SglangEngine(
            model, SglangConfig(), settings.model_copy(update={"sglang_url": server.url}), max_running=8,
            stop_ids=[bench.eos], detokenize=str,
        )  # fmt: skip
        created.append(engine)
        return engine

    yield make
    for engine in created:
        await engine.close()
    assert not server.is_gone, "a server that runs already is not ended"
    await server.close()


async def test_a_server_that_runs_already_gets_the_model_and_works_for_one_job(bench: Any, joined: Any) -> None:
    engine = joined()
    await engine.start()
    received: list[Token] = []
    request = bench.ask("joined", max_new_tokens=40, **bench.repeatable)
    sample = (await engine.generate(request, received.append)).samples[0]
    assert bench.error(sample) < 1e-4
    assert [token.token_id for token in received] == sample.token_ids[:-1]
    with pytest.raises(Unavailable, match="another job"):
        await joined().start()
    await engine.pause("keep")
    await engine.close()
    again = joined()
    await again.start()
    assert (await again.generate(request)).samples[0].token_ids == sample.token_ids


WORKER = """
import asyncio, os, sys
from pathlib import Path
from penstock.services.rollout.engines.adapter import ModelFiles
from penstock.services.rollout.engines.sglang.engine import SglangEngine
from penstock.shared.config.rollout import SglangConfig
from penstock.shared.config.service import ServiceSettings

async def main(url, model, shm, device):
    files = ModelFiles(path=Path(model), tokenizer=Path(model), dtype="float32", vocab_size=54, max_length=512,
                       device=device)
    settings = ServiceSettings(shm_dir=Path(shm), data_dir=Path(shm), worker_id="killed", sglang_url=url)
    engine = SglangEngine(files, SglangConfig(), settings, max_running=8, stop_ids=[], detokenize=str)
    await engine.start()
    await engine.pause("keep")
    print("paused", engine._lease.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_worker_that_is_killed_in_a_pause_leaves_a_server_that_goes_on(
    bench: Any, joined: Any, settings: Any
) -> None:
    placed = joined()
    url, model = placed._settings.sglang_url, placed.model
    server = EngineServer("SGLang", url)
    command = (sys.executable, "-c", WORKER, url, str(model.path), str(settings.shm_dir), model.device)
    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    async with asyncio.timeout(120):
        said = (await worker.stdout.readline()).split()
    assert said[:1] == [b"paused"]
    body = {"rid": "other", "input_ids": list(bench.prompt), "sampling_params": {"max_new_tokens": 1}}
    other = asyncio.create_task(server.post("/generate", body, "answer another client"))
    done, _ = await asyncio.wait({other}, timeout=0.5)
    assert not done, "the server is paused while its worker lives"
    worker.kill()
    await worker.wait()
    async with asyncio.timeout(30):
        assert (await other)["meta_info"]["completion_tokens"] == 1
        while is_alive(int(said[1])):
            await asyncio.sleep(0.05)
    await placed.start()
    sample = (await placed.generate(bench.ask("follower", max_new_tokens=40))).samples[0]
    assert (len(sample.token_ids), bench.error(sample) < 1e-4) == (40, True)
    await server.close()


async def test_a_server_whose_worker_was_killed_goes_on_once_another_joins(bench: Any, joined: Any) -> None:
    """Show what happens if the watchdog ends with the worker, for instance because their container was killed."""
    killed = joined()
    await killed.start()
    server = EngineServer("SGLang", killed._server.url)
    await killed.close()
    await server.post("/pause_generation", {"mode": "retract"}, "pause")  # the last request of a worker killed then
    body = {"rid": "other", "input_ids": list(bench.prompt), "sampling_params": {"max_new_tokens": 1}}
    other = asyncio.create_task(server.post("/generate", body, "answer another client"))
    done, _ = await asyncio.wait({other}, timeout=0.5)
    assert not done, "no time limit ends a pause"
    follower = joined()
    await follower.start()
    sample = (await follower.generate(bench.ask("follower", max_new_tokens=40))).samples[0]
    assert (len(sample.token_ids), bench.error(sample) < 1e-4) == (40, True)
    assert (await other)["meta_info"]["completion_tokens"] <= 1
    await server.close()


def with_eom(source: Path, folder: Path, token_id: int) -> Path:
    """Copy a tokenizer to ``folder`` with ``<|eom_id|>`` as the name of a token, as tokenizers of Llama 3 have it."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text())
    vocab = table["model"]["vocab"]
    name = next(name for name, number in vocab.items() if number == token_id)
    vocab["<|eom_id|>"] = vocab.pop(name)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    table["added_tokens"].append({"id": token_id, "content": "<|eom_id|>", "special": True, **flags})
    path.write_text(json.dumps(table))
    return folder


async def test_a_stop_that_only_the_server_knows_is_a_cut(bench: Any, settings: Any, tmp_path: Path) -> None:
    """SGLang also stops at ``<|eom_id|>`` of a tokenizer, although the request does not name it."""
    own = {"max_new_tokens": 40, "temperature": 0.0}
    free = (await bench.engine.generate(bench.ask("free", **own))).samples[0].token_ids
    eom = next(token for token in free[5:] if token != bench.eos)
    begun = free[: free.index(eom) + 1]
    assert bench.eos not in begun
    model = replace(bench.engine.model, tokenizer=with_eom(bench.engine.model.tokenizer, tmp_path / "eom", eom))
    engine = SglangEngine(model, SglangConfig(), settings, max_running=4, stop_ids=[bench.eos], detokenize=str)
    await engine.start()
    try:
        for stop_token_ids, finish in (((), "length"), ((eom,), "stop")):
            request = bench.ask(f"until {finish}", ignore_eos=False, stop_token_ids=stop_token_ids, **own)
            sample = (await engine.generate(request)).samples[0]
            assert (sample.finish, sample.token_ids) == (finish, begun)
        whole = (await engine.generate(bench.ask("ignored", **own))).samples[0]
        assert (whole.finish, whole.token_ids) == ("length", free)
    finally:
        await engine.close()


async def test_names_that_the_server_does_not_know_are_refused_by_the_worker(
    bench: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ignores them, and serves the version: only the check of the worker finds a version of another model."""
    manifest, close = await publish(settings, bench.weights(1) | {"model.layers.0.nobody.weight": torch.ones(3)})
    with pytest.raises(WeightsError, match="no parameter"):
        await bench.engine.stage(manifest, None)
    with monkeypatch.context() as patch:
        patch.setattr(CHECK, lambda layout, expected: None)
        await bench.engine.stage(manifest, None)
    await bench.engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    await bench.engine.commit_update()
    assert bench.error(await completion(bench, "ignored"), seeds=(0, 1)) < 1e-4
    close()


async def test_a_load_that_fails_ends_the_server_and_serves_no_version(
    bench: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang goes back to the file that it could not load, and its scheduler ends. The test ends the engine."""
    weights = bench.weights(1)
    name = next(reversed(weights))
    manifest, close = await publish(settings, weights | {name: weights[name][:-1].clone()})
    engine = bench.engine
    asking = asyncio.create_task(engine.generate(bench.ask("cut")))
    await bench.until_tokens(20)
    with monkeypatch.context() as patch:
        patch.setattr(CHECK, lambda layout, expected: None)
        await engine.stage(manifest, None)
    await engine.begin_update(version=1, digest=manifest.digest, mode="in_place")
    with pytest.raises(Unavailable, match="could not load weights"):
        await engine.commit_update()
    await bench.until_unavailable(asking)
    with pytest.raises(Unavailable):
        await engine.generate(bench.ask("refused"))
    assert await engine.weight_info() == WeightInfo(version=0, digest=bench.digests[0], dirty=True)
    close()
    await engine.close()


async def publish(settings: Any, weights: dict[str, Tensor]) -> tuple[WeightManifest, Callable[[], None]]:
    """Publish weights whose layout is not that of the model; return the manifest, and what closes the publisher."""
    publisher = open_publisher("job_strange", layout_of(weights.items()), settings)
    return await asyncio.to_thread(publisher.publish, weights.items(), version=1, epoch=1), publisher.close
