"""Trace ids: read from the W3C's header, created where there is none, and carried by tasks, envelopes and log lines."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack
from penstock.shared.protocol.trace import current_trace, new_trace, trace_of, tracing
from penstock.shared.runtime.logs import JsonFormatter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"cc-{TRACE}-{PARENT}-01-what-comes-later", TRACE),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{PARENT}-01", ""),
        (f"00-{TRACE[1:]}-{PARENT}-01", ""),
        ("{'trace': 1}\n", ""),
        ("", ""),
    ],
)
def test_only_a_valid_header_gives_a_trace_id(header: str, trace: str) -> None:
    assert trace_of(header) == trace


def test_a_new_trace_is_one_that_a_header_may_carry() -> None:
    first, second = new_trace(), new_trace()
    assert first != second
    assert trace_of(f"00-{first}-{PARENT}-01") == first


async def test_only_messages_and_log_lines_inside_a_trace_carry_its_id() -> None:
    async def send() -> str:
        return unpack(pack(Ack(ok=True)), Ack)[1].trace

    with tracing(TRACE):
        task = asyncio.create_task(send())
        line = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "x"})))
        assert unpack(pack(Ack(ok=True), trace="another"), Ack)[1].trace == "another", (
            "a reply carries the trace of its request"
        )
    assert line["trace"] == await task == TRACE
    assert (current_trace(), await send()) == ("", "")
    assert "trace" not in json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "x"})))
