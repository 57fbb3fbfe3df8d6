"""Judge and HTTP scorer against a real server that fails, replies nonsense, is slow or is away."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from penstock.services.reward.pool import ScorerPool
from penstock.services.reward.scorers.http import Http
from penstock.services.reward.scorers.judge import Judge
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rewards.scorers import HttpScorer, JudgeScorer
from penstock.shared.errors import ScoringError
from penstock.shared.protocol.messages import ScoreRequest
from penstock.shared.transport.server import ValkeyServer

OpenJudge = Callable[..., Judge]
OpenHttp = Callable[..., Http]
MANUAL = Path(__file__).parents[2] / "docs/rewards.md"


def judge_config(web: Any, **changes: Any) -> JudgeScorer:
    spec = {"base_url": f"{web.url}/v1", "model": "grader", "template": "Q {prompt} A {completion}", "deadline_s": 20.0}
    return JudgeScorer.parse({**spec, **changes})


def http_config(web: Any, **changes: Any) -> HttpScorer:
    return HttpScorer.parse({"url": f"{web.url}/score", "deadline_s": 20.0, "timeout_s": 10.0, **changes})


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scorers use some environment variables, as the operator of the service may."""
    monkeypatch.setenv("PENSTOCK_SCORER_ENV", "GRADER_KEY, SIGNING_SECRET,SCORES_KEY")


@pytest.fixture
def open_judge(web: Any) -> Iterator[OpenJudge]:
    """Yield a function that opens judges on ``web``, with changes of their configuration."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(closing(Judge(judge_config(web, **changes))))


@pytest.fixture
def open_http(web: Any) -> Iterator[OpenHttp]:
    """Yield a function that opens HTTP scorers on ``web``, with changes of their configuration."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(closing(Http(http_config(web, **changes))))


def completion_of(text: Any, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


def in_turn(*answers: Any) -> Callable[[Any], Any]:
    """Return a handler that gives ``answers`` in order, and then repeats the last one."""
    left = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda _: next(left)


def one(scorer: Judge | Http, completion: str = "4", row: dict[str, Any] | None = None) -> float | ScoringError:
    (found,) = scorer.score_group("2+2=", [completion], "4", row or {})
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- the judge -------------------------------------------------------------------------------------------------------


def test_judge_sends_what_the_job_says_and_maps_the_grade(
    web: Any, monkeypatch: pytest.MonkeyPatch, open_judge: OpenJudge
) -> None:
    monkeypatch.setenv("GRADER_KEY", "secret-key")
    web.answer = lambda _: web.reply(completion_of("First I thought score: 2. No.\nSCORE = 7.5"))
    judge = open_judge(
        template="{prompt}{completion} ({answer}, {topic})", system="Be fair.", api_key_env="GRADER_KEY",
        request={"seed": 3},
    )  # fmt: skip
    assert one(judge, "{5}", {"topic": "sums"}) == 0.75
    assert "secret-key" not in judge.about
    (asked,) = web.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer secret-key"
    assert asked.json == {
        "model": "grader",
        "messages": [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "2+2={5} (4, sums)"}],
        "temperature": 0.0,
        "max_tokens": 512,
        "seed": 3,
    }


def test_judge_reads_json_of_a_schema(web: Any, open_judge: OpenJudge) -> None:
    schema = {"type": "object", "properties": {"grade": {"type": "number"}}}
    web.answer = in_turn(
        web.reply(completion_of('{"grade": 4}')),
        web.reply(completion_of('{"grade": true}')),
        web.reply(completion_of("4")),
    )
    judge = open_judge(json_schema=schema, json_field="grade", scale=(-4.0, 4.0), temperature=None)
    assert one(judge) == 1.0
    assert "no number 'grade'" in str(one(judge, "5"))
    assert "no number 'grade'" in str(one(judge, "6"))
    assert web.asked[0].json["response_format"]["json_schema"]["schema"] == schema
    assert "temperature" not in web.asked[0].json


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_judge_is_asked_again_after_a_passing_failure(web: Any, status: int, open_judge: OpenJudge) -> None:
    web.answer = in_turn(web.reply("later", status, Retry_After="0.01"), web.reply(completion_of("score: 10")))
    assert one(open_judge()) == 1.0
    assert len(web.asked) == 2


def test_judge_that_is_slow_once_is_asked_again(web: Any, open_judge: OpenJudge) -> None:
    web.answer = in_turn(web.reply(completion_of("score: 1"), wait_s=30), web.reply(completion_of("score: 10")))
    assert one(open_judge(timeout_s=0.5)) == 1.0


@pytest.mark.parametrize("status", [301, 400, 401, 404])
def test_judge_is_not_asked_again_after_a_lasting_failure(web: Any, status: int, open_judge: OpenJudge) -> None:
    web.answer = lambda _: web.reply({"error": "wrong key"}, status, Location=f"{web.url}/elsewhere")
    assert f"answers {status}" in str(one(open_judge()))
    assert len(web.asked) == 1


def test_judge_gives_up_at_its_deadline(web: Any, open_judge: OpenJudge) -> None:
    web.answer = lambda _: web.reply("busy", 429, Retry_After="60")
    assert "answers 429" in str(one(open_judge(deadline_s=5)))
    web.answer = lambda _: web.reply(completion_of("score: 10"), wait_s=60)
    assert "before the deadline" in str(one(open_judge(deadline_s=0.5)))
    web.released.set()
    away = open_judge(base_url=f"http://127.0.0.1:{free_port()}", deadline_s=3)
    assert "cannot be reached" in str(one(away))


GARBAGE = {
    "no JSON": (b"<html>", "no chat completion"),
    "no choices": ({"object": "error"}, "no chat completion"),
    "empty choices": ({"choices": []}, "no chat completion"),
    "no content": (completion_of(None), "no chat completion"),
    "a list": ([1], "no chat completion"),
    "no grade": (completion_of("A fine answer."), "no grade in the judge's reply: 'A fine answer.'"),
    "too high": (completion_of("score: 11"), "grade 11 lies outside scale 0 to 10"),
    "negative": (completion_of("score: -1"), "grade -1 lies outside"),
    "cut short": (completion_of("score: 7", finish="length"), "cut short: raise max_tokens"),
}


@pytest.mark.parametrize("name", list(GARBAGE))
def test_judge_without_a_usable_grade_is_a_failure_and_not_remembered(
    web: Any, name: str, open_judge: OpenJudge
) -> None:
    body, message = GARBAGE[name]
    web.answer = in_turn(web.reply(body), web.reply(completion_of("score: 10")))
    judge = open_judge()
    found = one(judge)
    assert isinstance(found, ScoringError)
    assert message in str(found)
    assert one(judge) == 1.0, "the failure is not in the cache"


def test_endless_reply_is_cut_off(web: Any, open_judge: OpenJudge) -> None:
    web.answer = lambda _: web.reply(b" " * (9 << 20))
    assert "more than 8388608 bytes" in str(one(open_judge()))


def test_equal_requests_are_sent_once(web: Any, open_judge: OpenJudge) -> None:
    web.answer = lambda _: web.reply(completion_of("score: 5"))
    judge = open_judge()
    for _ in range(2):
        assert list(judge.score_group("2+2=", ["4", "5", "4"], None, {})) == [0.5] * 3
    assert len(web.asked) == 2
    other = open_judge(model="other")
    assert one(other) == 0.5
    assert len(web.asked) == 3, "another model grades for itself"
    uncached = open_judge(cache=False)
    assert [one(uncached), one(uncached)] == [0.5] * 2
    assert len(web.asked) == 5


def test_judges_share_replies_in_valkey_and_do_without_it(
    web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_judge: OpenJudge
) -> None:
    web.answer = lambda _: web.reply(completion_of("score: 5"))
    with ValkeyServer(tmp_path / "valkey") as server:
        monkeypatch.setenv("PENSTOCK_REDIS_URL", server.url)
        assert one(open_judge()) == 0.5
        second = open_judge()
        assert one(second) == 0.5
        assert len(web.asked) == 1
    assert one(second, "5") == 0.5, "a cache that is away costs no completion"
    assert len(web.asked) == 2


def test_concurrency_is_bounded(web: Any, open_judge: OpenJudge) -> None:
    web.answer = lambda _: web.reply(completion_of("score: 5"), wait_s=0.1)
    scores = open_judge(concurrency=3).score_group("q", [str(i) for i in range(12)], None, {})
    assert list(scores) == [0.5] * 12
    assert 2 <= web.most_active <= 3


def test_missing_key_is_reported_when_the_scorer_opens(
    web: Any, monkeypatch: pytest.MonkeyPatch, open_judge: OpenJudge, open_http: OpenHttp
) -> None:
    monkeypatch.delenv("GRADER_KEY", raising=False)
    for open_it in (
        lambda: open_judge(api_key_env="GRADER_KEY"),
        lambda: open_http(secret_env="GRADER_KEY"),
    ):
        with pytest.raises(ScoringError, match="environment variable GRADER_KEY of the reward service is not set"):
            open_it()


def test_a_job_may_not_send_any_variable_anywhere(
    web: Any, monkeypatch: pytest.MonkeyPatch, open_judge: OpenJudge, open_http: OpenHttp
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the host")
    for open_it in (open_judge, open_http):
        with pytest.raises(ScoringError, match="PENSTOCK_SCORER_ENV of the reward service allows GRADER_KEY, SIGNING"):
            open_it(api_key_env="AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ScoringError, match="may not use the environment variable AWS_SECRET_ACCESS_KEY"):
        open_http(secret_env="AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("PENSTOCK_SCORER_ENV")
    monkeypatch.setenv("GRADER_KEY", "secret-key")
    with pytest.raises(ScoringError, match="allows none"):
        open_judge(api_key_env="GRADER_KEY")
    assert not web.asked


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"])
def test_private_addresses_are_asked_only_where_the_deployment_allows_it(
    web: Any, monkeypatch: pytest.MonkeyPatch, open_judge: OpenJudge, open_http: OpenHttp, host: str
) -> None:
    monkeypatch.delenv("PENSTOCK_SCORER_PRIVATE")
    monkeypatch.setenv("HTTP_PROXY", web.url)
    address = f"http://{host}:{web.server_port}"
    for scorer in (open_judge(base_url=f"{address}/v1"), open_http(url=f"{address}/score")):
        found = one(scorer)
        assert isinstance(found, ScoringError)
        assert "a private address" in str(found) and "PENSTOCK_SCORER_PRIVATE=true" in str(found)
    assert not web.asked


def test_the_operators_own_model_may_be_anywhere(
    web: Any, monkeypatch: pytest.MonkeyPatch, open_judge: OpenJudge
) -> None:
    monkeypatch.delenv("PENSTOCK_SCORER_PRIVATE")
    monkeypatch.setenv("PENSTOCK_GRADER_URL", f"{web.url}/v1")
    web.answer = lambda _: web.reply(completion_of("score: 10"))
    assert one(open_judge()) == 1.0


def test_a_checked_address_is_the_one_that_is_connected_to(
    web: Any, monkeypatch: pytest.MonkeyPatch, open_http: OpenHttp
) -> None:
    """A name that is public when it is checked and private a moment later leads to the public address."""
    monkeypatch.delenv("PENSTOCK_SCORER_PRIVATE")
    resolve, times_asked = socket.getaddrinfo, itertools.count(1)

    def rebinding(host: Any, *more: Any, **named: Any) -> Any:
        if host != "rebind.test":  # threads of other tests ask, too
            return resolve(host, *more, **named)
        address = "203.0.114.1" if next(times_asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, web.server_port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    found = one(open_http(url=f"http://rebind.test:{web.server_port}/score", timeout_s=0.5, deadline_s=1.0))
    assert isinstance(found, ScoringError)
    assert next(times_asked) > 1, "the name was checked"
    assert not web.asked


def test_redirects_are_not_followed(web: Any, open_judge: OpenJudge, open_http: OpenHttp) -> None:
    web.answer = lambda _: web.reply("elsewhere", 307, Location=f"{web.url}/elsewhere")
    for scorer in (open_judge(deadline_s=2.0), open_http(deadline_s=2.0)):
        assert "answers 307" in str(one(scorer))
    assert "/elsewhere" not in [asked.path for asked in web.asked]


async def test_failed_judge_fails_its_trajectories_and_no_other(web: Any) -> None:
    """A real scorer process gives them no default reward, and returns each component in the parts of the reply."""

    def answer(asked: Any) -> Any:
        text = asked.json["messages"][0]["content"]
        return web.reply("no", 400) if "bad" in text else web.reply(completion_of("score: 10"))

    web.answer = answer
    judge = judge_config(web, weight=2.0, name="taste", deadline_s=5.0).model_dump()
    config = RewardConfig.parse({"scorers": [judge, {"type": "exact"}], "slow": True})
    pool = ScorerPool(config, 1)
    await pool.start()
    try:
        reply = await pool.score(ScoreRequest(prompt="2+2=", completions=["4", "bad", "5"], answer="4", row={}))
    finally:
        await pool.close()
    assert reply.failed == [False, True, False]
    assert reply.rewards == [3.0, 0.0, 2.0]
    assert reply.parts == {"taste": [1.0, 0.0, 1.0], "exact": [1.0, 0.0, 0.0]}
    assert "completion 1: " in reply.errors[0] and "answers 400" in reply.errors[0]
    assert pool.about["taste"] == f"grader at {web.url}/v1"


# -- the web service -------------------------------------------------------------------------------------------------


def lengths(web: Any) -> Callable[[Any], Any]:
    return lambda asked: web.reply({"results": [{"score": len(text)} for text in asked.json["completions"]]})


def test_http_sends_batches_and_keeps_their_order(web: Any, open_http: OpenHttp) -> None:
    web.answer = lengths(web)
    scorer = open_http(batch_size=2, concurrency=2)
    assert list(scorer.score_group("p", ["", "a", "bb", "ccc", "dddd"], "x", {"k": 1})) == [0, 1, 2, 3, 4]
    sent = sorted((asked.json for asked in web.asked), key=lambda message: len(message["completions"][0]))
    assert sent[0] == {"schema": 1, "prompt": "p", "completions": ["", "a"], "answer": "x", "row": {"k": 1}}
    assert [message["completions"] for message in sent[1:]] == [["bb", "ccc"], ["dddd"]]


def test_http_requests_and_replies_are_those_of_the_manual(web: Any, open_http: OpenHttp) -> None:
    section = MANUAL.read_text(encoding="utf-8").partition("## HTTP\n")[2].partition("\n## ")[0]
    request, reply = map(json.loads, re.findall(r"```json\n(.*?)```", section, flags=re.DOTALL))
    web.answer = lambda _: web.reply(reply)
    score, error = open_http().score_group(request["prompt"], request["completions"], request["answer"], request["row"])
    assert [asked.json for asked in web.asked] == [request]
    assert score == reply["results"][0]["score"]
    assert str(error) == f"the service says: {reply['results'][1]['error']}"


def test_http_requests_can_be_verified(web: Any, monkeypatch: pytest.MonkeyPatch, open_http: OpenHttp) -> None:
    monkeypatch.setenv("SIGNING_SECRET", "s3cret")
    monkeypatch.setenv("SCORES_KEY", "token")
    web.answer = lengths(web)
    scorer = open_http(secret_env="SIGNING_SECRET", api_key_env="SCORES_KEY", send_row=False)
    assert one(scorer, "four", {"k": 1}) == 4
    (asked,) = web.asked
    signed = asked.headers["x-penstock-timestamp"].encode() + b"." + asked.body
    assert asked.headers["x-penstock-signature"] == "sha256=" + hmac.new(b"s3cret", signed, hashlib.sha256).hexdigest()
    assert asked.headers["authorization"] == "Bearer token"
    assert "row" not in asked.json
    (code,) = re.findall(r"```python\n(def verify\(.*?)```", MANUAL.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {"hashlib": hashlib, "hmac": hmac, "time": time}
    exec(code, names)
    sent = {name: asked.headers[name.lower()] for name in ("X-Penstock-Timestamp", "X-Penstock-Signature")}
    assert names["verify"]("s3cret", sent, asked.body)
    assert not names["verify"]("s3cret", sent, asked.body + b" ")


def test_http_failures_belong_to_single_completions(web: Any, open_http: OpenHttp) -> None:
    results = [{"score": 1}, {"error": "cannot parse"}, {"score": None}, {"score": True}, 7, {"score": -0.5}]
    web.answer = lambda _: web.reply({"results": results})
    found = open_http().score_group("p", list("abcdef"), None, {})
    assert [found[0], found[5]] == [1.0, -0.5]
    assert "the service says: cannot parse" in str(found[1])
    assert all("must be {'score': number}" in str(found[i]) for i in (2, 3, 4))


@pytest.mark.parametrize(
    "body", [b"ok", {"results": []}, {"results": [{"score": 1}] * 2}, [], b'{"results": [{"score": NaN}]}']
)
def test_http_answer_of_another_form_fails_the_batch(web: Any, body: Any, open_http: OpenHttp) -> None:
    web.answer = lambda _: web.reply(body)
    assert "with 1 entries" in str(one(open_http()))


@pytest.mark.parametrize("status", [429, 503])
def test_http_repeats_what_the_service_did_not_take(web: Any, status: int, open_http: OpenHttp) -> None:
    web.answer = in_turn(web.reply("full", status), web.reply({"results": [{"score": 1}]}))
    assert one(open_http()) == 1.0
    first, second = web.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_http_does_not_repeat_what_the_service_may_have_worked_on(web: Any, open_http: OpenHttp) -> None:
    web.answer = lambda _: web.reply("oops", 500)
    assert 'answers 500: "oops"' in str(one(open_http()))
    web.answer = lambda _: web.reply({"results": [{"score": 1}]}, wait_s=60)
    assert "did not answer" in str(one(open_http(timeout_s=0.3)))
    assert len(web.asked) == 2


def test_http_waits_for_a_service_that_starts_late(open_http: OpenHttp) -> None:
    """A refused connection is retried, because no request was sent."""
    port = free_port()
    scorer = open_http(url=f"http://127.0.0.1:{port}/", deadline_s=30.0)
    reply = b'HTTP/1.1 200 OK\r\nContent-Length: 27\r\n\r\n{"results": [{"score": 1}]}'

    def serve() -> None:
        with socket.create_server(("127.0.0.1", port)) as server:
            client, _ = server.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(reply)

    service = threading.Timer(0.4, serve)
    service.start()
    assert one(scorer) == 1.0
    service.join()
