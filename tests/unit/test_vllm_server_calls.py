"""Requests to vLLM's HTTP server, and every form of its answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.vllm.calls import sampling_fields
from penstock.services.rollout.engines.vllm.server_calls import (
    Stream,
    abort_body,
    command_line,
    generate_body,
    read_scores,
    score_body,
)
from penstock.services.rollout.engines.vllm.workers import KNOWN_VERSIONS, check_shared_memory, check_version
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Sampling

LOGPROBS = {11: -0.1, 12: -0.2, 13: -0.3, 14: -0.4}


def test_an_engine_without_shared_memory_says_what_is_missing(tmp_path: Path) -> None:
    """vLLM itself would fail only after minutes, so both adapters check first. /proc stands for a full device."""
    with pytest.raises(Unavailable, match=r"need 256 MiB of shared memory, and /proc has 0 MiB free.*shm_size"):
        check_shared_memory(Path("/proc"))
    check_shared_memory(tmp_path / "missing")
    check_shared_memory(tmp_path)


def test_a_version_without_a_passed_contract_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for known in KNOWN_VERSIONS:
        check_version(known)
        check_version(f"{known}+cpu")
    assert not caplog.records
    check_version("0.99.1+cu130")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"tested with vLLM {KNOWN_VERSIONS[0]}, not with this 0.99.1+cu130" in record.getMessage()


def completion(*, streamed: bool = False, top_logprobs: int = 0, **sampling: Any) -> Completion:
    wanted = Sampling(**{"max_new_tokens": 9, **sampling})
    return Completion(0, 0, (5, 6), wanted, (2, 14), seed=-1, streamed=streamed, top_logprobs=top_logprobs)


def stream(**options: Any) -> Stream:
    return Stream(completion(**options), detokenize=lambda ids: "".join(chr(96 + token - 10) for token in ids))


def row(token: int, logprob: float | None = None, rank: int | None = 1, top: tuple[Any, ...] = ()) -> dict[str, Any]:
    own = {"token_id": token, "logprob": LOGPROBS[token] if logprob is None else logprob, "rank": rank}
    return {**own, "top_logprobs": [own, *top]}


def event(rows: list[dict[str, Any]], finish: str | None = None, spans: Any = None) -> dict[str, Any]:
    choice = {
        "index": 0, "finish_reason": finish, "token_ids": [each["token_id"] for each in rows],
        "logprobs": {"content": rows}, "weight_versions": spans,
    }  # fmt: skip
    return {"request_id": "generate-tokens-r.", "choices": [choice]}


def test_options_become_words_that_no_parser_misreads() -> None:
    options = {"max_logprobs": -1, "enforce_eager": True, "trust_remote_code": False, "path": None, "config": {"a": 1}}
    assert command_line(options) == ["--max-logprobs=-1", "--enforce-eager", '--config={"a": 1}']


def test_a_request_has_tokens_alone_and_no_stop_strings() -> None:
    wanted = completion(temperature=0.0, logit_bias=((4, 1.5),), stop_strings=("x",))
    body = generate_body("r.", wanted, vocab_size=54)
    assert {key: body[key] for key in ("request_id", "token_ids", "stream", "output_mode")} == {
        "request_id": "r.", "token_ids": [5, 6], "stream": True, "output_mode": "tokens",
    }  # fmt: skip
    fields = body["sampling_params"]
    assert fields == sampling_fields(wanted), "the same fields as for the in-process engine"
    assert fields["seed"] == (1 << 63) - 1, "a seed of vLLM is a signed 64-bit number"
    assert (fields["stop_token_ids"], fields["ignore_eos"], fields["detokenize"]) == ([2, 14], True, False)
    assert "stop" not in fields


@pytest.mark.parametrize(("wanted", "asked"), [(0, 0), (1, 2), (20, 21), (54, 54), (60, 54)])
def test_a_request_asks_for_one_more_likely_token_than_wanted(wanted: int, asked: int) -> None:
    body = generate_body("r.", completion(top_logprobs=wanted), vocab_size=54)
    assert body["sampling_params"]["logprobs"] == asked


def test_an_abort_names_requests_as_the_server_does_and_is_never_of_all() -> None:
    assert abort_body(["a.", "b."]) == {"request_ids": ["generate-tokens-a.", "generate-tokens-b."]}
    with pytest.raises(AssertionError):
        abort_body([])


def test_tokens_are_recorded_with_the_served_label() -> None:
    found = stream(streamed=True)
    assert found.final(event([row(11)])) is None
    reported, finish = found.take(event([row(11), row(12)]), "3:ab")
    assert ([token.token_id for token in reported], finish) == ([11, 12], None)
    last = event([row(13), row(14)], "stop", [{"version": "3:ab", "start": 0, "end": 4}])
    reported, finish = found.take(last, "3:ab")
    assert ([token.token_id for token in reported], finish) == ([13], "stop"), "a stop token is not reported"
    spans = found.final(last)
    assert spans is not None
    found.settle(spans)
    assert (found.token_ids, found.logprobs) == ([11, 12, 13, 14], [-0.1, -0.2, -0.3, -0.4])
    assert found.completion.starts == [(3, "ab", 0)]


def test_spans_of_the_server_give_the_weights_of_each_token() -> None:
    found = stream()
    found.take(event([row(11), row(12)]), "1:b")
    spans = [{"version": "0:a", "start": 0, "end": 1}, {"version": "1:b", "start": 1, "end": 2}]
    last = event([], "abort", spans)
    assert found.take(last, "1:b") == ([], "abort")
    assert found.final(last) == spans
    found.settle(spans)
    assert found.completion.starts == [(0, "a", 0), (1, "b", 1)]


def test_tokens_need_spans_and_an_empty_completion_needs_none() -> None:
    found = stream()
    assert found.final(event([], "abort")) == ()
    found.take(event([row(11)]), "0:")
    with pytest.raises(WeightsError, match="does not say which weights"):
        found.final(event([], "abort"))


@pytest.mark.parametrize("finish", ["error", "repetition"])
def test_an_end_that_is_neither_stop_nor_length_is_an_abort(finish: str) -> None:
    assert stream().take(event([row(11)], finish), "0:")[1] == "abort"


def test_the_client_ends_a_completion_at_a_stop_string() -> None:
    found = stream(stop_strings=("bc",))
    reported, finish = found.take(event([row(token) for token in LOGPROBS]), "0:")
    assert (finish, found.token_ids) == ("stop", [11, 12, 13])
    assert [token.token_id for token in reported] == [11, 12]


@pytest.mark.parametrize("rank", [1, None], ids=["minus infinity", "not a number"])
def test_a_floored_log_prob_is_read_as_minus_infinity(rank: int | None) -> None:
    found = stream()
    found.take(event([row(11, -9999.0, rank)]), "0:")
    assert found.logprobs == [-math.inf]


def test_likely_tokens_are_those_of_the_best_ranks() -> None:
    others = ({"token_id": 7, "logprob": -0.5, "rank": 2}, {"token_id": 8, "logprob": -0.2, "rank": 1})
    found = stream(top_logprobs=2)
    found.take(event([row(11, -3.0, 9, others), row(12, -0.1, 1, others[:1])]), "0:")
    assert found.completion.top == [[(8, -0.2), (7, -0.5)], [(12, -0.1), (7, -0.5)]]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, ConfigError),
        ({"error": {"message": "Scale-out endpoints are disabled", "code": 403}}, ConfigError),
        ({"error": {"message": "EngineCore died", "code": 500}}, Unavailable),
        ({"choices": [{"token_ids": [11], "logprobs": None, "finish_reason": None}]}, Unavailable),
        ({"choices": [{"token_ids": [11], "logprobs": {"content": [row(12)]}, "finish_reason": None}]}, Unavailable),
    ],
)
def test_errors_are_attributed_to_the_request_or_to_the_server(part: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        stream().take(part, "0:")


def test_scores_must_belong_to_the_requested_text() -> None:
    entry = {"decoded_token": None}
    rows = [
        None,
        {"6": {"logprob": -1.0, "rank": 4, **entry}, "9": {"logprob": -0.5, "rank": 1, **entry}},
        {"7": {"logprob": -9999.0, "rank": 9, **entry}, "8": {"logprob": -0.6, "rank": 1, **entry}},
    ]
    assert score_body("r.", (5, 6, 7), 1)["sampling_params"]["prompt_logprobs"] == 1
    answer = {"prompt_logprobs": rows}
    assert read_scores(answer, [5, 6, 7], 1) == ([-1.0, -math.inf], [[(9, -0.5)], [(8, -0.6)]])
    assert read_scores(answer, [5, 6, 7], 0) == ([-1.0, -math.inf], [])
    for text in ([5, 6, 4], [5, 6], [5, 6, 7, 7]):
        with pytest.raises(Unavailable, match="another text"):
            read_scores(answer, text, 0)
