"""Pure parts of the bus: times, acknowledgement subjects, addresses."""

from __future__ import annotations

import pytest

from penstock.shared.errors import ProtocolError
from penstock.shared.transport.connection import redact
from penstock.shared.transport.message import own_headers, parse_ack, unix_time


def test_times_keep_their_fraction() -> None:
    assert unix_time("2026-11-20T14:28:50.33069381Z") == pytest.approx(1795184930.33069381, abs=1e-6)
    assert unix_time("1970-01-01T00:00:01Z") == 1.0


@pytest.mark.parametrize(
    "reply",
    ["$JS.ACK.S.C.2.7.3.1795184991684486092.11", "$JS.ACK.hub.ACCOUNT.S.C.2.7.3.1795184991684486092.11.random"],
)
def test_an_acknowledgement_subject_is_read_with_and_without_a_domain(reply: str) -> None:
    info = parse_ack(reply)
    assert (info.stream, info.consumer, info.deliveries) == ("S", "C", 2)
    assert (info.stream_seq, info.consumer_seq, info.pending) == (7, 3, 11)
    assert info.time_ns == 1795184991684486092


def test_other_replies_are_refused() -> None:
    with pytest.raises(ProtocolError):
        parse_ack("_INBOX.abc.1")


def test_server_headers_are_taken_out() -> None:
    headers = {"Nats-Sequence": "1", "Nats-Msg-Id": "m", "Penstock-Group": "{}", "Nats-Batch-Id": "b"}
    assert own_headers(headers) == {"Nats-Msg-Id": "m", "Penstock-Group": "{}"}
    assert own_headers(None) == {}


def test_addresses_are_shown_without_secrets() -> None:
    assert redact("nats://me:secret@host:4222,tls://token@other:1") == "nats://host:4222,tls://other:1"
    assert redact("nats://host:4222") == "nats://host:4222"
