"""Graders as scorers: real sandbox, real web service."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.user_code import CodeTrials
from penstock.services.reward.grading import GradingService
from penstock.services.reward.scorers.grader import OpenGrader
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.rewards.scorers import GraderScorer
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.user_code import code_path
from penstock.shared.errors import ConfigError, ScoringError
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.transport.bus import Bus

CHECK = {"type": "string_check", "name": "right", "operation": "ilike", "input": "{{sample.output_text}}",
         "reference": "{{item.answer}}"}  # fmt: skip
PYTHON = {
    "type": "python",
    "name": "length",
    "source": "import time\n\n"
    "def grade(sample, item):\n"
    "    text = sample['output_text']\n"
    "    if text == 'slow':\n        time.sleep(60)\n"
    "    if text == 'exit':\n        raise SystemExit\n"
    "    if text == 'huge':\n        return 10 ** 400\n"
    "    odd = {'nan': float('nan'), 'text': 'x'}\n"
    "    return odd.get(text, len(text) / item['most'])\n",
}
JUDGE = {
    "type": "score_model", "name": "judge", "model": "grader-1", "range": [0, 5],
    "input": [{"role": "developer", "content": "Be strict."},
              {"role": "user", "content": [{"type": "input_text", "text": "Q {{item.q}} "},
                                           {"type": "input_text", "text": "A {{sample.output_text}}"}]}],
    "sampling_params": {"temperature": 0.5, "max_completions_tokens": 9},
}  # fmt: skip


def graded(grader: dict[str, Any], completions: list[str], item: dict[str, Any], **more: Any) -> list[float | str]:
    """Grade completions; return a score or the text of the error for each."""
    config = GraderScorer.model_validate({"grader": grader, "deadline_s": 30, **more})
    with closing(OpenGrader(config)) as scorer:
        found = scorer.score_group("", completions, None, item)
    return [str(one) if isinstance(one, ScoringError) else one for one in found]


def chat(text: Any, **message: Any) -> Any:
    return {"choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}]}


def test_string_checks() -> None:
    assert graded(CHECK, ["The ANSWER is b", "c"], {"answer": "answer"}) == [1.0, 0.0]
    (missing,) = graded(CHECK, ["x"], {"other": 1})
    assert missing == "invalid_variable_error: there is no 'item.answer'"
    parsed = {**CHECK, "operation": "eq", "input": "{{sample.output_json.a}}", "reference": "1"}
    good, bad = graded(parsed, ['{"a": 1}', "no JSON"], {})
    assert (good, str(bad).partition(":")[0]) == (1.0, "sample_parse_error")
    deep = '{"a": ' + "[" * 1000 + "]" * 1000 + "}"
    good, bad = graded(parsed, ['{"a": 1}', deep], {})
    assert (good, str(bad).partition(":")[0]) == (1.0, "sample_parse_error")


def test_text_similarity() -> None:
    close = {"type": "text_similarity", "name": "s", "evaluation_metric": "fuzzy_match", "reference": "abcd",
             "input": "{{sample.output_text}}"}  # fmt: skip
    assert graded(close, ["abcd", "ab", ""], {}) == [1.0, pytest.approx(4 / 6), 0.0]
    assert graded({**close, "evaluation_metric": "rouge_1"}, ["Abcd!"], {}) == [1.0]
    long, good = graded({**close, "reference": "{{item.long}}"}, ["a" * 40_000, ""], {"long": "b" * 40_000})
    assert (str(long).partition(":")[0], good) == ("other_error", 0.0)


@pytest.mark.long
def test_python_runs_in_the_sandbox() -> None:
    found = graded(PYTHON, ["abc", "nan", "text", "exit", "slow", "abcdef"], {"most": 6}, time_limit_s=1.0)
    assert (found[0], found[-1]) == (0.5, 1.0)
    kinds = [str(text).partition(":")[0] for text in found[1:-1]]
    assert kinds == ["python_grader_runtime_error"] * 3 + ["unresponsive_reward_error"]
    gc.collect()  # what other tests left open is not closed in between
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    nested = "[" * 1000 + "]" * 1000
    *failed, good = graded(PYTHON, ["huge", nested, "abc"], {"most": 6})
    kinds = [str(text).partition(":")[0] for text in failed]
    assert (kinds, good) == (["python_grader_runtime_error", "python_grader_server_error"], 0.5)
    assert len([*Path("/proc/self/fd").iterdir()]) <= descriptors, "a run that failed left something open"
    (raised,) = graded(PYTHON, ["abc"], {})
    assert raised == "python_grader_runtime_error: grade() raised KeyError: 'most'"


@pytest.mark.parametrize(("source", "words"), [("def grade(:", "not Python"), ("x = 1", "defines no function grade")])
def test_python_that_cannot_be_opened(source: str, words: str) -> None:
    with pytest.raises(ScoringError, match=f"^python_grader_runtime_error: .*{words}"):
        OpenGrader(GraderScorer.model_validate({"grader": {**PYTHON, "source": source}}))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import math\n\ndef grade(sample, item):\n    return len(sample['output_text']) / item['most']\n", ""),
        ("x = 1\n", "python_grader_runtime_error: own.py defines no function grade(sample, item)"),
        (
            "\ndef grade(sample):\n    return 1.0\n",
            "python_grader_runtime_error: grade() in line 2 of own.py cannot be called with (sample, item)",
        ),
    ],
)
def test_python_of_an_uploaded_file(tmp_path: Path, monkeypatch: Any, source: str, error: str) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    digest = FileStore(tmp_path / "files", max_bytes=1, max_files=1).add_code(source).sha256
    grader = {"type": "python", "name": "own", "path": f"own@{digest}:grade"}
    if not error:
        assert graded(grader, ["abc"], {"most": 6}) == [0.5]
        code_path(tmp_path, digest).write_text(source.replace("len", "2 * len"))
        error = "python_grader_server_error: the grader: .* is not what was uploaded: its SHA-256 differs"
    with pytest.raises(ScoringError, match=error.replace("(", r"\(").replace(")", r"\)")):
        OpenGrader(GraderScorer.model_validate({"grader": grader}))
    code_path(tmp_path, digest).unlink()
    with pytest.raises(ScoringError, match=r"'own\.py' cannot be read beside the reward service"):
        OpenGrader(GraderScorer.model_validate({"grader": grader}))


def test_python_cannot_reach_files(tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    source = f"def grade(sample, item):\n    return float(open({str(secret)!r}).read())\n"
    (found,) = graded({**PYTHON, "source": source}, ["x"], {})
    assert str(found).startswith("python_grader_runtime_error: grade() raised")


def test_a_model_grades(web: Any) -> None:
    def answer(asked: Any) -> Any:
        last = asked.json["messages"][1]["content"]
        replies: dict[str, Callable[[], Any]] = {
            "Q why A good": lambda: chat('{"result": 4}'),
            "Q why A refused": lambda: chat(None, refusal="no"),
            "Q why A chatty": lambda: chat("four"),
            "Q why A high": lambda: chat('{"result": 6}'),
            "Q why A bool": lambda: chat('{"result": true}'),
        }
        return web.reply(replies[last]()) if last in replies else web.reply({"error": "x"}, 400)

    web.answer = answer
    names = ["good", "refused", "chatty", "high", "bool", "broken", "good"]
    found = graded(JUDGE, names, {"q": "why"}, base_url=f"{web.url}/v1")
    assert [one if isinstance(one, float) else one.partition(":")[0] for one in found] == [
        4.0, "model_grader_refusal_error", "model_grader_parse_error", "model_grader_parse_error",
        "model_grader_parse_error", "model_grader_server_error", 4.0,
    ]  # fmt: skip
    assert len(web.asked) == 6, "equal requests are sent once"
    body = orjson.loads(web.asked[0].body)
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("grader-1", 0.5, 9)
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["result"]


@pytest.mark.long
async def test_models_that_grade_are_asked_once_before_a_job(web: Any, bus: Bus, tmp_path: Path) -> None:
    """A model that fails to answer leads to a warning of the dry run; a missing key refuses the job."""
    replies = {"grader-1": chat('{"result": 4}'), "judge-1": chat("8")}
    web.answer = lambda asked: web.reply(replies[asked.json["model"]]) if replies else web.reply("no such model", 404)
    members, settings = Members(), ServiceSettings(data_dir=tmp_path)
    beat = Heartbeat(
        service="reward", worker="reward-0", host="h", pid=1, started=0, interval_s=600, health_port=1, ready=True,
        jobs={},
    )  # fmt: skip
    members.on_heartbeat(beat, time.monotonic())
    grader = {"type": "grader", "grader": {**JUDGE, "input": [{"role": "user", "content": "{{sample.output_text}}"}]}}
    judge = {"type": "judge", "model": "judge-1", "template": "{completion}?", "scale": [0, 10], "pattern": r"(\d+)"}

    async def warnings_of(**more: str) -> list[str]:
        where = {"base_url": f"{web.url}/v1", **more}
        spec = parse_job({
            "name": "graded", "model": {"config": {}, "tokenizer": "char"}, "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{**grader, **where}, {**judge, **where}], "timeout_s": 100},
            "train": {"batch_size": 16, "max_updates": 1},
        })  # fmt: skip
        return await CodeTrials(bus, GraderBench(bus, settings), members).run(spec)

    async with await GradingService(bus).open():
        assert await warnings_of() == []
        asked = {one.json["model"]: one.json["messages"][0]["content"] for one in web.asked}
        assert asked["judge-1"] == f"{asked['grader-1']}?", "both were shown the reference answer"
        assert int(asked["grader-1"]) >= 0
        replies.clear()
        warnings = await warnings_of()
        assert [text.partition(":")[0] for text in warnings] == [
            "reward.scorers[0] (judge)",
            "reward.scorers[1] (judge)",
        ]
        assert all("tried on the first row" in text and "answers 404" in text for text in warnings), warnings
        with pytest.raises(ConfigError, match=r"reward\.scorers.0.*may not use the environment variable NO_SUCH_KEY"):
            await warnings_of(api_key_env="NO_SUCH_KEY")


def test_a_formula_over_several(web: Any) -> None:
    web.answer = lambda asked: web.reply(chat('{"result": 5}'))
    both = {
        "type": "multi",
        "name": "m",
        "graders": {"right": CHECK, "judge": JUDGE},
        "calculate_output": "right*judge/5",
    }
    where = {"base_url": f"{web.url}/v1"}
    assert graded(both, ["yes", "no"], {"answer": "yes", "q": "?"}, **where) == [1.0, 0.0]
    (root,) = graded({**both, "calculate_output": "sqrt(right - judge)"}, ["yes"], {"answer": "yes", "q": "?"}, **where)
    assert str(root).startswith("formula_parse_error")
