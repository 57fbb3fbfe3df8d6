"""User code is imported, checked and called once before a job is submitted, in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import BaseModel

from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.user_code import ROLLOUT_KEYS, CodeTrials
from penstock.services.env.service import EnvService
from penstock.services.env.tools.trial import example_of
from penstock.services.rollout import trial
from penstock.shared.config.environment import EnvironmentConfig, VerifiersConfig
from penstock.shared.config.jobs.kinds import KINDS, AnyJob, parse_job
from penstock.shared.config.rewards.graders import PythonGrader
from penstock.shared.config.rewards.scorers import FunctionScorer
from penstock.shared.config.rollout import ClassConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.config.tools import FunctionTool, MethodTool
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.protocol.trials import Finding, TrialReply, TrialRequest
from penstock.shared.runtime.user_process import run_trial
from penstock.shared.transport.bus import Bus

ROW = {"prompt": "1+1=", "answer": "2"}
WORD = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "times": {"type": "integer"}},
    "required": ["word"],
}
FUNCTIONS = """
import os, time

def good(word, times=1):
    assert (word, times) == ("text", 1)
    return word * times

def refuses(word, times=1):
    raise ValueError("no such word")

def narrow(word):
    return word

def greedy(word, times):
    return word

def raises(word, times=1):
    return {"a": 1}[word]

def unsendable(word, times=1):
    return {word}

def hangs(word, times=1):
    os.system("sleep 600 &")
    time.sleep(600)

def dies(word, times=1):
    os._exit(3)
"""
CLASSES = """
class Good:
    def __init__(self, seed, row):
        self.wanted = row["answer"]

    def look(self, word, times=1):
        return self.wanted

    def reward(self, answer):
        return float(answer == self.wanted)

class Seedless(Good):
    def __init__(self, row):
        self.wanted = row["answer"]

class Fussy(Good):
    def __init__(self, seed, row):
        self.wanted = row["hint"]

class Narrow(Good):
    def look(self, word):
        return word

class Silent:
    def __init__(self, seed, row):
        pass

    def look(self, word, times=1):
        return word

class Strict(Good):
    def reward(self, answer):
        return {}[answer]
"""
ORDERS = """
def good(row):
    return len(row["prompt"])

def narrow():
    return 1

def raises(row):
    return row["level"]

def wordy(row):
    return "easy"

def find(text):
    return [(0, 2, "name")]

def beyond(text):
    return [(0, len(text) + 1, "name")]

def broken(text):
    return [("a", 1)]

class Engine:
    def __init__(self, files, options, settings, *, max_running, stop_ids, detokenize, threads):
        raise AssertionError("a trial opens no engine")

class Narrow:
    def __init__(self, files, options):
        pass
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with user modules, on the import path of the workers' processes."""
    for name, source in (("trial_functions", FUNCTIONS), ("trial_classes", CLASSES), ("trial_orders", ORDERS)):
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "trial_missing.py").write_text("\nimport nothing_of_that_name\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def request(parts: dict[str, Any], *, limit_s: float = 60.0, **changes: Any) -> TrialRequest:
    words = {"prompt": "1+1=", "answer": "2", "row": ROW, "start_by": time.time() + 60, **changes}
    return TrialRequest(parts=parts, limit_s=limit_s, **words)


def tools(path: str, *more: str, kind: str = "function", name: str = "look") -> dict[str, Any]:
    described = {"type": kind, "description": "A tool.", "parameters": WORD}
    rows = [{**described, "name": f"{name}{n or ''}", "path": each} for n, each in enumerate((path, *more))]
    return {"environment": EnvironmentConfig.parse({"tools": rows}).model_dump(mode="json")}


async def tried(parts: dict[str, Any], **words: Any) -> list[Finding]:
    return (await run_trial("penstock.services.env.tools.trial", request(parts, **words))).findings


async def test_a_tool_of_a_user_is_imported_checked_and_called(modules: Path) -> None:
    named = [f"trial_functions:{name}" for name in ("good", "refuses", "narrow", "greedy", "raises", "unsendable")]
    found = await tried(tools(*named, "trial_missing:look", "no_such_module:look"))
    by_place = {finding.key: finding for finding in found}
    assert [finding.fatal for finding in found] == [True, True, False, False, True, True]
    assert "cannot be called with (word, times): got an unexpected keyword argument 'times'" in found[0].text
    assert "cannot be called with (word): missing a required argument: 'times'" in found[1].text
    raised = by_place["environment.tools[4] (look4)"].text
    assert f"raised KeyError: 'text' ({modules}/trial_functions.py, line 18)" in raised
    assert 'calling it with {"word": "text", "times": 1}' in raised
    assert "`examples: [...]`" in raised
    assert "not JSON serializable" in by_place["environment.tools[5] (look5)"].text
    missing = by_place["environment.tools[6] (look6)"].text
    assert "No module named 'nothing_of_that_name'" in missing
    assert f"({modules}/trial_missing.py, line 2)" in missing
    assert "No module named 'no_such_module'" in by_place["environment.tools[7] (look7)"].text


@pytest.mark.long
async def test_a_tool_that_hangs_or_dies_ends_its_trial(modules: Path) -> None:
    (late,) = await tried(tools("trial_functions:hangs"), limit_s=8.0)
    assert (late.fatal, "was not over after 8 s" in late.text) == (False, True), late
    started = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert not [words for words in started if words[:1] == ["sleep"]], "processes that the tool started ended with it"
    (dead,) = await tried(tools("trial_functions:dies"))
    assert (dead.key, dead.fatal) == ("environment.tools[0] (look)", False)
    assert "ended the process with exit status 3" in dead.text


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "judges", "fatal", "text"),
    [
        ("Good", True, None, ""),
        ("Seedless", True, True, "cannot be called with (seed, row): got an unexpected keyword argument 'seed'"),
        ("Fussy", False, False, "trial_classes:Fussy(seed=0, row=<the first row>) raised KeyError: 'hint'"),
        ("Narrow", False, True, "the method 'look' of 'trial_classes:Narrow' cannot be called with (word, times)"),
        ("Silent", True, True, "has a method `reward(answer)`"),
        ("Silent", False, None, ""),
        ("Strict", True, False, "raised KeyError: '2'"),
        ("Nothing", False, True, "cannot import name 'Nothing'|has no attribute 'Nothing'"),
    ],
)
async def test_a_users_object_is_created_from_the_first_row_and_judges(
    modules: Path, name: str, judges: bool, fatal: bool | None, text: str
) -> None:
    found = await tried(tools(f"trial_classes:{name}", kind="method"), judges=judges)
    assert [finding.fatal for finding in found] == ([] if fatal is None else [fatal]), found
    assert not found or any(each in found[0].text for each in text.split("|")), found


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "name", "fatal", "text"),
    [
        ("data.curriculum", "trial_orders:good", None, ""),
        ("data.curriculum", "trial_orders:narrow", True, "cannot be called with (row): too many positional arguments"),
        ("data.curriculum", "trial_orders:raises", False, "raised KeyError: 'level'"),
        ("data.curriculum", "trial_orders:wordy", False, "returned 'easy'; it must return a number"),
        ("data.curriculum", "trial_missing:rank", True, "No module named 'nothing_of_that_name'"),
        ("online.redaction.function", "trial_orders:find", None, ""),
        ("online.redaction.function", "trial_orders:narrow", True, "cannot be called with (text)"),
        ("online.redaction.function", "trial_orders:beyond", False, "the redaction function found [0, "),
        ("online.redaction.function", "trial_orders:broken", False, "the redaction function failed: ValueError"),
        ("rollout.path", "trial_orders:Engine", None, ""),
        ("rollout.path", "trial_orders:Narrow", True, "cannot be called with (files, options, settings, *"),
        ("rollout.path", "trial_orders:ENGINE", True, "has no attribute 'ENGINE'"),
    ],
)
async def test_code_that_rollout_workers_import_is_tried(
    modules: Path, key: str, name: str, fatal: bool | None, text: str
) -> None:
    found = (await run_trial(trial.MODULE, request({key: name}))).findings
    assert [(finding.key, finding.fatal) for finding in found] == ([] if fatal is None else [(key, fatal)]), found
    assert not found or text in found[0].text, found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("class Own: pass\n", None),
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("class Other: pass\n", "has no attribute 'Own'"),
    ],
)
async def test_code_in_the_directory_of_a_model_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str | None
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own_model", "auto_map": classes}))
    config = 'import transformers\nclass OwnConfig(transformers.PretrainedConfig):\n    model_type = "own_model"\n'
    (folder / "own.py").write_text(config + source)
    key = "model.trust_remote_code"
    found = (await run_trial(trial.MODULE, request({key: str(folder)}, limit_s=280))).findings
    assert [(finding.key, finding.fatal) for finding in found] == ([] if text is None else [(key, True)]), found
    assert text is None or text in found[0].text, found


async def test_an_env_worker_tries_environments(bus: Bus, modules: Path) -> None:
    service = EnvService(bus, ServiceSettings())
    running = asyncio.create_task(service.run())

    async def ask(parts: dict[str, Any], **words: Any) -> list[Finding]:
        data = await bus.request(subjects.ENV_TRY, pack(request(parts, **words)), deadline_s=90)
        return unpack(data, TrialReply)[0].findings

    try:
        async with asyncio.timeout(30):
            while not service.ready:
                await asyncio.sleep(0.02)
        assert await ask(tools("trial_functions:good")) == []
        section = VerifiersConfig.model_validate({"env": {"taskset": {"id": "x"}}, "python": "/no/such/python"})
        (found,) = await ask({"environment": section.model_dump(mode="json")})
        assert (found.key, found.fatal) == ("environment.env", True)
        assert "'/no/such/python' does not start" in found.text
        with pytest.raises(Unavailable, match="nobody waits for this trial"):
            await ask(tools("trial_functions:good"), start_by=time.time() - 60)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def job_with_code(**parts: Any) -> AnyJob:
    """A job whose scorer is code of the user."""
    return parse_job(
        {
            "name": "untried",
            "model": {"config": {"hidden_size": 16}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "function", "path": "trial_functions:good"}]},
            "train": {"batch_size": 16, "max_updates": 1},
            **parts,
        }
    )


async def test_a_dry_run_waits_until_a_new_coordinator_knows_the_workers(bus: Bus, tmp_path: Path) -> None:
    """A worker that ran before sends its next heartbeat after the submission has arrived."""
    settings = ServiceSettings(data_dir=tmp_path, heartbeat_s=0.5)
    service = CoordinatorService(bus, settings)
    assert service.members.complete_at > time.monotonic(), "before it listens, and from then on"
    beat = Heartbeat(
        service="reward", worker="reward-0", host="h", pid=1, started=0.0, interval_s=60.0, health_port=0,
        ready=True, jobs={},
    )  # fmt: skip
    beating = asyncio.get_running_loop().call_later(0.2, service.members.on_heartbeat, beat, time.monotonic() + 0.2)
    plan = await service.services.submissions.dry_run(job_with_code())
    assert beating.when() < asyncio.get_running_loop().time()
    (warning,) = [text for text in plan["warnings"] if "not tried" in text]
    assert "no reward worker runs here" not in warning


async def test_code_that_no_worker_can_try_is_a_warning(bus: Bus, tmp_path: Path) -> None:
    section = tools("trial_functions:good")["environment"]
    spec = job_with_code(
        data={"train": {"type": "addition"}, "curriculum": "trial_orders:good"},
        environment={**section, "max_turns": 2},
    )
    members, settings = Members(), ServiceSettings(data_dir=tmp_path)
    warnings = await CodeTrials(bus, GraderBench(bus, settings), members).run(spec)
    assert [text.partition(":")[0] for text in warnings] == [
        "reward.scorers[0] (trial_functions", "environment", "data.curriculum",
    ]  # fmt: skip
    for service, text in zip(("reward", "env", "rollout"), warnings, strict=True):
        assert f"not tried, because no {service} worker runs here" in text


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "text"),
        ({"type": ["integer", "null"], "minimum": 3}, 3),
        ({"type": "number", "maximum": 0.5}, 0.5),
        ({"enum": ["up", "down"]}, "up"),
        ({"type": "string", "examples": ["Oslo"], "default": "x"}, "Oslo"),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, True),
        ({"type": "array", "items": {"type": "integer"}}, [1]),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {}}}, {"a": None, "b": "text"}),
    ],
)
def test_examples_of_arguments_follow_their_schema(schema: dict[str, Any], value: object) -> None:
    assert example_of(schema) == value


def test_every_key_that_names_code_is_tried() -> None:
    """Fails if a new key of a job file names code for which there is no trial."""
    tried_elsewhere = {
        (FunctionScorer, "path"), (FunctionTool, "path"), (MethodTool, "path"), (PythonGrader, "path"),
        (VerifiersConfig, "python"),
    }  # fmt: skip
    found: set[tuple[type[BaseModel], str]] = set()
    models: list[Any] = list(KINDS.values())
    seen: set[int] = set()
    while models:
        each = models.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type) and issubclass(each, BaseModel):
            for name, field in each.model_fields.items():
                if "code" in field.metadata:
                    found.add((each, name))
                models.append(field.annotation)
        models += getattr(each, "__args__", ())
        models += [getattr(each, "__origin__", None)]
    names = {key.rpartition(".")[2] for key in ROLLOUT_KEYS}
    rest = found - tried_elsewhere
    assert {name for _, name in rest} <= names, rest
    assert (ClassConfig, "path") in found
    assert tried_elsewhere <= found
