"""Logs, metrics, health endpoint."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.errors import ConfigError
from penstock.shared.runtime import metrics
from penstock.shared.runtime.health import HealthServer
from penstock.shared.runtime.logs import JsonFormatter, bound, setup_logging


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    entry = logging.LogRecord("penstock.x", logging.WARNING, __file__, 1, message, args, None)
    vars(entry).update(extra)
    return entry


def test_a_log_line_is_json_with_its_context() -> None:
    with bound(job="job_1", policy_version=3), bound(policy_version=4):
        line = json.loads(JsonFormatter().format(record("took %d ms", 5, draw={"ordinal": 1}, path={1, 2})))
    assert line["message"] == "took 5 ms"
    assert (line["level"], line["logger"]) == ("warning", "penstock.x")
    assert (line["job"], line["policy_version"], line["draw"]) == ("job_1", 4, {"ordinal": 1})
    assert line["time"].endswith("+00:00")
    assert "job" not in json.loads(JsonFormatter().format(record("later")))


@pytest.fixture
def own_root() -> Iterator[None]:
    """Restore the handlers and the level of the root logger after the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_root")
def test_lines_also_go_to_a_file_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "logs" / "rollout-gone.log"
    old.parent.mkdir()
    old.write_text("x")
    os.utime(old, (0, 0))
    setup_logging("info", service="trainer", worker="host-17", directory=tmp_path / "logs")
    logging.getLogger("penstock.x").warning("took %d ms", 5)
    (path,) = (tmp_path / "logs").iterdir()
    assert path.name == "trainer-host-17.log"
    assert json.loads(path.read_text())["message"] == "took 5 ms"
    assert path.read_text() == capsys.readouterr().err

    setup_logging("info", service="trainer", worker="trainer-0", directory=tmp_path / "logs")
    assert (tmp_path / "logs" / "trainer-0.log").exists()
    with pytest.raises(ConfigError, match="PENSTOCK_LOG_FILES: cannot write"):
        setup_logging("info", service="trainer", worker="w", directory=path / "below a file")


def test_an_error_is_one_line() -> None:
    entry = record("broke\nhere")
    try:
        raise ValueError("why")
    except ValueError:
        entry.exc_info = sys.exc_info()
    text = JsonFormatter().format(entry)
    assert "\n" not in text
    assert "ValueError: why" in json.loads(text)["error"]


async def test_tasks_inherit_the_context_they_were_started_in() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return str(json.loads(JsonFormatter().format(record("x")))["job"])

    with bound(job="a"):
        first = asyncio.create_task(work())
    with bound(job="b"):
        second = asyncio.create_task(work())
    assert (await first, await second) == ("a", "b")


def test_metrics_have_the_prefix_and_base_units() -> None:
    steps = metrics.counter("test_steps_total", "Steps.", ["job"])
    steps.labels("job_1").inc(2)
    assert metrics.counter("test_steps", "Steps.", ["job"]) is steps
    metrics.gauge("test_bytes", "Bytes.").set(5)
    metrics.histogram("test_step_seconds", "Time.").observe(0.02)
    text = metrics.render().decode()
    assert 'penstock_test_steps_total{job="job_1"} 2.0' in text
    assert "penstock_test_bytes 5.0" in text
    assert 'penstock_test_step_seconds_bucket{le="0.03"} 1.0' in text
    with pytest.raises(ValueError, match="use seconds"):
        metrics.gauge("latency_ms", "No.")
    with pytest.raises(TypeError, match="already as a Counter"):
        metrics.gauge("test_steps", "No.")


async def ask(port: int, request: bytes) -> tuple[str, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 2)
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


async def test_health_readiness_and_metrics_are_served() -> None:
    state = {"ready": False}
    async with HealthServer("127.0.0.1", 0, lambda: (state["ready"], {"waiting_for": "the bus"})) as health:
        get = lambda path: ask(health.port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())  # noqa: E731
        assert await get("/healthz") == ("HTTP/1.1 200 OK", b'{"status":"ok"}')
        status, body = await get("/readyz?verbose=1")
        assert status == "HTTP/1.1 503 Service Unavailable"
        assert json.loads(body) == {"status": "not ready", "waiting_for": "the bus"}
        state["ready"] = True
        assert (await get("/readyz"))[0] == "HTTP/1.1 200 OK"
        assert (await get("/metrics"))[0] == "HTTP/1.1 200 OK"
        assert (await get("/else"))[0] == "HTTP/1.1 404 Not Found"
        assert (await ask(health.port, b"POST /healthz HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 405 Method Not Allowed"
        assert (await ask(health.port, b"HEAD /healthz HTTP/1.1\r\n\r\n")) == ("HTTP/1.1 200 OK", b"")
        assert (await ask(health.port, b"nonsense\r\n\r\n"))[0] == "HTTP/1.1 400 Bad Request"
        assert await ask(health.port, b"x" * 40_000) == ("", b"")
        assert await get("/healthz") == ("HTTP/1.1 200 OK", b'{"status":"ok"}')


async def test_a_taken_health_port_is_named() -> None:
    async with HealthServer("127.0.0.1", 0, lambda: (True, {})) as health:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{health.port}.*PENSTOCK_HEALTH_PORT"):
            async with HealthServer("127.0.0.1", health.port, lambda: (True, {})):
                pass
