"""Requests to a server of SGLang, and every form of its answers."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from penstock.services.rollout.engines.adapter import ModelFiles
from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.servers.stream import name_of
from penstock.services.rollout.engines.sglang.calls import Stream, generate_body, read_scores
from penstock.services.rollout.engines.sglang.engine import KNOWN_VERSIONS, SglangEngine
from penstock.shared.config.rollout import SglangConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Sampling

ROWS = [[-0.1, 11, None], [-0.2, 12, None], [-0.3, 13, None], [-0.4, 14, None]]
STOP = {"type": "stop", "matched": 14}
ABORT = {"type": "abort", "message": "Aborted by AbortReq.", "status_code": None, "err_type": None}


def completion(request: int = 0, index: int = 0, *, streamed: bool = False, **sampling: Any) -> Completion:
    wanted = Sampling(**{"max_new_tokens": 9, **sampling})
    return Completion(request, index, (5, 6), wanted, (2, 14), seed=7, streamed=streamed)


def stream(**options: Any) -> Stream:
    return Stream(completion(**options), detokenize=lambda ids: "".join(chr(96 + token - 10) for token in ids))


def event(num: int, rows: list[Any], reason: Any = None, **meta: Any) -> dict[str, Any]:
    meta = {"completion_tokens": num, "output_token_logprobs": rows, "finish_reason": reason, **meta}
    return {"text": "", "output_ids": [row[1] for row in rows], "meta_info": meta}


async def test_a_version_that_the_adapter_does_not_know_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelFiles(tmp_path, "float32", 29, 64)
    engine = SglangEngine(
        model, SglangConfig(), ServiceSettings(shm_dir=tmp_path), max_running=2, stop_ids=[2], detokenize=str
    )
    for known in KNOWN_VERSIONS:
        engine._look_at({"version": known, "context_length": 64})
        engine._look_at({"version": f"{known}+cpu"})
    assert not caplog.records
    for info, named in (({"version": "0.9.0"}, "not for 0.9.0"), ({}, "not for an unknown version")):
        caplog.clear()
        engine._look_at(info)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"written for SGLang {KNOWN_VERSIONS[0]}, {named}" in record.getMessage()


def test_no_request_id_is_a_prefix_of_another() -> None:
    names = [name_of("a", completion(request, index)) for request in (1, 10, 11) for index in (0, 1, 10)]
    assert not any(b.startswith(a) for a, b in permutations(names, 2))


def test_the_request_holds_the_conditions_that_end_a_completion() -> None:
    body = generate_body("r.", completion(temperature=0.0, top_k=0, logit_bias=((4, 1.5),), stop_strings=("x",)))
    assert body["sampling_params"] == {
        "max_new_tokens": 9, "min_new_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": -1,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {"4": 1.5}, "stop_token_ids": [2, 14],
        "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False, "sampling_seed": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    "events",
    [
        [event(2, ROWS[:2]), event(4, ROWS[2:], STOP)],
        [event(2, ROWS[:2]), event(4, ROWS, STOP)],
        [event(4, ROWS, STOP)],
    ],
    ids=["only what is new", "all again", "at once"],
)
def test_each_token_is_counted_once(events: list[dict[str, Any]]) -> None:
    found = stream(streamed=True)
    results = [found.take(one, "3:ab") for one in events]
    assert [token.token_id for tokens, _ in results for token in tokens] == [11, 12, 13], "a stop token is not reported"
    assert results[-1][1] == "stop"
    assert found.token_ids == [11, 12, 13, 14]
    assert found.logprobs == [-0.1, -0.2, -0.3, -0.4]
    assert found.completion.starts == [(3, "ab", 0)]


@pytest.mark.parametrize("rows", [ROWS[:2], [*ROWS[:2], *ROWS[:2]]], ids=["alone", "with events before it"])
def test_the_end_of_a_waiting_completion_repeats_tokens(rows: list[Any]) -> None:
    found = stream()
    if len(rows) == 2:
        found.take(event(2, ROWS[:2]), "0:")
    _, finish = found.take({**event(2, rows, ABORT), "output_ids": [12]}, "0:")
    assert (finish, found.token_ids) == ("abort", [11, 12])


def test_the_client_ends_a_completion_at_a_stop_string() -> None:
    found = stream(stop_strings=("bc",))
    reported, finish = found.take(event(4, ROWS), "0:")
    assert (finish, found.token_ids) == ("stop", [11, 12, 13])
    assert [token.token_id for token in reported] == [11, 12]


def test_a_stop_token_that_the_server_ignores_ends_the_completion_here() -> None:
    assert generate_body("r.", completion(ignore_eos=True))["sampling_params"]["ignore_eos"] is True
    found = stream(ignore_eos=True)
    reported, finish = found.take(event(6, [*ROWS, [-0.5, 15, None], [-0.6, 14, None]]), "0:")
    assert (finish, found.token_ids) == ("stop", [11, 12, 13, 14])
    assert [token.token_id for token in reported] == [11, 12, 13]


def test_a_stop_that_the_request_does_not_name_is_a_cut() -> None:
    found = stream()
    reported, finish = found.take(event(3, ROWS[:3], {"type": "stop", "matched": 13}), "0:")
    assert (finish, found.token_ids) == ("length", [11, 12, 13])
    assert [token.token_id for token in reported] == [11, 12]


def test_spans_of_the_server_give_the_weights_of_each_token() -> None:
    found = stream()
    found.take(event(4, ROWS, STOP), "1:b")
    spans = [{"version": "0:a", "start": 0, "end": 3}, {"version": "1:b", "start": 3, "end": 4}]
    found.settle(spans)
    assert found.completion.starts == [(0, "a", 0), (1, "b", 3)]
    found.settle([*spans, {"version": "2:c", "start": 4, "end": 9}])
    assert found.completion.starts == [(0, "a", 0), (1, "b", 3)], "tokens after a stop string do not count"
    with pytest.raises(WeightsError, match="somebody else"):
        found.settle([{"version": "default", "start": 0, "end": 4}])


def test_a_token_streamed_with_another_label_fails_its_completion() -> None:
    found = stream(streamed=True)
    found.take(event(4, ROWS, STOP), "1:b")
    found.settle([{"version": "1:b", "start": 0, "end": 4}])
    with pytest.raises(WeightsError, match="were told with the labels"):
        found.settle([{"version": "0:a", "start": 0, "end": 4}])


def test_a_server_without_spans_may_serve_one_version_alone() -> None:
    found = stream()
    found.take(event(2, ROWS[:2]), "0:a")
    found.settle(())
    found.take(event(4, ROWS[2:], STOP), "1:b")
    with pytest.raises(WeightsError, match="does not say which weights"):
        found.settle(())


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"error": {"message": "too long", "code": 400}}, ConfigError),
        ({"error": {"message": "1 validation error (HTTP 422)", "code": 422}}, ConfigError),
        ({"error": "Unexpected keyword argument 'max_tokens'"}, ConfigError),
        ({"error": {"message": "out of memory", "code": 500}}, Unavailable),
        (event(0, [], {"type": "abort", "message": "too long", "status_code": 400}), ConfigError),
        (event(0, [], {"type": "abort", "message": "shutting down", "status_code": 503}), Unavailable),
        (event(3, ROWS[:1]), Unavailable),
    ],
)
def test_errors_are_attributed_to_the_request_or_to_the_server(part: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        stream().take(part, "0:")


def test_scores_must_belong_to_the_requested_text() -> None:
    meta = {
        "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
        "input_top_logprobs": [None, [[-0.5, 9, None]], [[-0.6, 8, None]]],
    }
    assert read_scores({"meta_info": meta}, [5, 6, 7], 1) == ([-1.0, -2.0], [[(9, -0.5)], [(8, -0.6)]])
    assert read_scores({"meta_info": meta}, [5, 6, 7], 0) == ([-1.0, -2.0], [])
    with pytest.raises(Unavailable, match="another text"):
        read_scores({"meta_info": meta}, [5, 6, 8], 0)
