"""Pages of the manual, done as they stand, on one deployment: Python, commands and job files, in order.

``tests/repo/test_snippets.py`` reads the snippets of all pages; here those of a few are executed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

import penstock
from penstock.shared.config.base import with_overrides
from penstock.shared.errors import Conflict
from penstock.shared.protocol.jobs import TERMINAL_PHASES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["python.md", "rewards.md", "dashboard.md", *sorted(path.name for path in (ROOT / "docs").glob("job-*.md")),
         "api.md"]  # fmt: skip
"""Pages that are done; `api.md` changes the number of workers and comes last."""
KEY = "e2e-key"
SMALLER: dict[str, tuple[str, ...]] = {
    "rl": ("train.max_updates=2", "train.batch_size=16", "evaluation.num_prompts=8", "limits.byte_budget=8388608"),
    "evaluation": ("evaluation.num_prompts=8", "limits.byte_budget=8388608"),
    "serving": (),
}
"""Changes that make a job file of a page small, by the kind of job."""
RUNNING = {"amend", "scale", "why", "workers"}
"""Commands that are about a job that runs; others are about one that has ended."""
AGENT = "my-agent"
LETTERS = "0123456789+-*/=?,.: abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ…"

A_MENTION = "names a command or an option, and leaves out its job"
OTHER_PROGRAMS = "downloads gigabytes"
NOT_RUN = {
    "penstock up": "the deployment that all others need",
    "penstock up --engine vllm": OTHER_PROGRAMS,
    "penstock up --engine vllm_server": OTHER_PROGRAMS,
    "penstock engines install vllm": OTHER_PROGRAMS,
    "penstock engines install sglang": OTHER_PROGRAMS,
    "pip install penstock[verifiers]": OTHER_PROGRAMS,
    "make screenshots": "trains several jobs for minutes, and writes into the manual",
    "penstock get --json": A_MENTION,
    "penstock keys create --code": A_MENTION,
    "penstock record": A_MENTION,
    "penstock submit --dry-run": A_MENTION,
    "penstock webhooks": A_MENTION,
    "penstock why": A_MENTION,
    "job.metrics().to_pandas()": "needs pandas, which nothing else here needs",
    'client.post_interaction("my-agent", prompt_token_ids=…, token_ids=…, logprobs=…, policy_version=17, reward=0.7)': (
        "leaves out the tokens"
    ),
    "def score(prompt: str, completion: str, answer: str | None, row: dict, *, bonus: float = 0.0) -> float:": (
        "run by tests/e2e/test_user_code.py"
    ),
    "name: own-reward": "run by tests/e2e/test_user_code.py",
    "penstock submit job.yaml --dry-run": "run by tests/e2e/test_user_code.py",
    "penstock submit job.yaml --follow": "run by tests/e2e/test_user_code.py",
    "def verify(secret: str, headers: dict[str, str], body: bytes) -> bool:": (
        "run by tests/contract/test_web_scorers.py"
    ),
}
"""First line of each snippet that is not run here, and the reason. Every other snippet of the pages is run."""

PARTS = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(penstock|curl|make|pip) ")
CALL = re.compile(r"(client|job|penstock)(\.\w+)+\(")


class Snippet(NamedTuple):
    """Something that a reader can do: ``kind`` is python, command, job (a whole job file) or call."""

    kind: str
    text: str

    @property
    def name(self) -> str:
        """Its first line."""
        return self.text.splitlines()[0]


def snippets(page: str) -> Iterator[Snippet]:
    """Everything on a page that can be done, in order; sections of job files and bodies of requests cannot."""
    for language, fence, inline in PARTS.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if inline and COMMAND.match(inline):
            yield Snippet("command", inline)
        elif inline and CALL.match(inline):
            yield Snippet("call", inline)
        elif language == "python":
            yield Snippet("python", fence)
        elif language in ("bash", "console", "sh"):
            for line in fence.replace("\\\n", " ").splitlines():
                if shlex.split(line, comments=True):
                    yield Snippet("command", line.removeprefix("$ "))
        elif language == "yaml" and re.search(r"^name:", fence, re.MULTILINE):
            yield Snippet("job", fence)


def to_run(page: str) -> list[Snippet]:
    return [one for one in snippets(page) if one.name not in NOT_RUN]


def test_what_is_not_run_is_on_a_page_and_run_where_the_table_says() -> None:
    found = {one.name for page in PAGES for one in snippets(page)}
    assert NOT_RUN.keys() - found == set(), "no page has these any more"
    for reason in NOT_RUN.values():
        for path in re.findall(r"run by (\S+)", reason):
            assert "docs/rewards.md" in (ROOT / path).read_text(encoding="utf-8"), path
    assert {one.kind for page in PAGES for one in to_run(page)} == {"python", "command", "job", "call"}


@pytest.fixture(scope="module")
def deployment(deploy: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A deployment of its own: pages change its workers, and what they start is ended."""
    deployment = deploy(tmp_path_factory.mktemp("manual") / "stack")
    deployment.environment["PENSTOCK_EXPERIENCE_BYTES"] = str(1 << 30)  # for the byte budgets that the pages leave out
    with deployment as stack:
        yield stack


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """The first job file of the manual, made small."""
    first = next(one for one in snippets("job-file.md") if one.kind == "job")
    return with_overrides({**yaml.safe_load(first.text), "name": "small"}, SMALLER["rl"])


@pytest.fixture(scope="module")
def ended(deployment: Any, small: dict[str, Any]) -> str:
    """Id of the small job, which has ended."""
    job: str = deployment.client.submit(small).id
    assert deployment.finish(job, 180).status.phase == "succeeded"
    return job


class Reader:
    """Does what a page says, in the present folder; the Python of a page shares its names."""

    def __init__(self, stack: Any, ended: str) -> None:
        self.stack, self.ended, self.file = stack, ended, Path("job.yaml")
        self.names: dict[str, Any] = {"penstock": penstock}
        self.opened: list[Any] = []

    def do(self, one: Snippet) -> None:
        """Run a snippet, and end the jobs that it leaves running."""
        {"python": self.python, "command": self.command, "job": self.job, "call": self.call}[one.kind](one.text)
        for record in self.stack.client.list(limit=100):
            if record.status.phase not in TERMINAL_PHASES:
                with suppress(Conflict):  # it has ended meanwhile
                    self.stack.client.cancel(record.id, force=True)
                self.stack.finish(record.id)

    def python(self, text: str) -> None:
        """Run a program; the agent that it may ask is served by then."""
        if AGENT in text:
            self.serve_agent()
        code = text.replace("http://127.0.0.1:8000", self.stack.stack.url)
        try:
            exec(compile(code, "snippet", "exec"), self.names)
        finally:
            self.opened += self.names.values()

    def call(self, text: str) -> None:
        """Evaluate a call that stands in a sentence."""
        names = {**self.names, "client": self.stack.client}
        self.opened.append(eval(text.replace('"NAME"', repr(self.ended)), names))

    def command(self, text: str) -> None:
        """Run a command line, in this process."""
        program, *words = shlex.split(text, comments=True)
        assert program == "penstock", "other programs are not run yet: do that here, or name it in NOT_RUN"
        job = self.running() if words[0] in RUNNING else self.ended
        stands_for = {"JOB": job, "NAME": job, "FILE": str(self.file)}
        done = self.stack.cli(*(stands_for.get(word, word) for word in words))
        assert done.exit_code == 0, f"{text}\n{done.output}"

    def job(self, text: str) -> None:
        """Submit a job file, made small; it succeeds, or is served."""
        data = yaml.safe_load(text)
        kind, self.file = data.get("kind", "rl"), Path(f"{data['name']}.yaml")
        self.file.write_text(text, encoding="utf-8")
        changes = [word for change in SMALLER[kind] for word in ("--set", change)]
        done = self.stack.cli("submit", str(self.file), "--json", *changes)
        assert done.exit_code == 0, f"{text}\n{done.output}"
        job = json.loads(done.stdout)["id"]
        if kind == "serving":
            self.until_it_runs(job)
        else:
            record = self.stack.finish(job, 180)
            assert record.status.phase == "succeeded", record.status.message

    def running(self) -> str:
        """Id of a job that runs until somebody ends it."""
        job: str = self.stack.submit("train.max_updates=20000", "checkpoint.every=20000", name="running")
        self.stack.reach(job, 1)
        return job

    def serve_agent(self) -> None:
        """Serve the agent of the examples under the name of the manual, until it answers."""
        spec = yaml.safe_load((ROOT / "examples/agent.yaml").read_text(encoding="utf-8"))
        model = {**spec["model"], "characters": LETTERS}
        job = self.stack.client.submit({**spec, "name": AGENT, "model": model, "limits": {"byte_budget": 32 << 20}}).id
        self.until_it_runs(job)
        body = {"model": AGENT, "messages": [{"role": "user", "content": "3+4="}]}

        def answers() -> bool:
            headers = {"Authorization": f"Bearer {KEY}"}
            url = f"{self.stack.stack.url}/v1/chat/completions"
            return httpx.post(url, json=body, headers=headers, timeout=60).is_success

        self.stack.until(answers, "the agent answers", 90)

    def until_it_runs(self, job: str) -> None:
        """Wait until a job is led and its model is loaded."""

        def runs() -> bool:
            status = self.stack.status(job)
            assert status.phase not in TERMINAL_PHASES, (status.phase, status.message)
            return bool(status.phase == "running")

        self.stack.until(runs, f"{job} runs", 120, lambda: self.stack.client.why(job))

    def close(self) -> None:
        """Close the connections that the programs of the page leave open."""
        import openai

        for one in {id(one): one for one in self.opened}.values():
            if isinstance(one, penstock.Job | openai.OpenAI):
                one.__exit__(None, None, None)


@pytest.fixture
def reader(
    deployment: Any, ended: str, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    """A reader beside the deployment: with its address, its key below the home directory, and a folder with a job."""
    folder = tmp_path / "home" / ".penstock"
    folder.mkdir(parents=True)
    (folder / "api.key").write_text(KEY + "\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PENSTOCK_URL", deployment.stack.url)
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(small))
    found = Reader(deployment, ended)
    yield found
    found.close()


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_what_a_page_shows_can_be_done(page: str, reader: Reader) -> None:
    for one in to_run(page):
        reader.do(one)
