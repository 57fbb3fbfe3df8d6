"""Find the snippets of the manual that a reader can run, name them, and give the reason for each that no test runs.

``tests/repo/test_snippets.py`` checks all of them; ``tests/e2e/test_manual.py`` runs them on a deployment.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_group

from penstock.cli import app
from penstock.shared.config.jobs.amendable import with_patch

ROOT = Path(__file__).resolve().parents[1]
LAST = ("docs/api.md", "docs/cli.md")
"""Pages that run last: they change the number of workers, and state that other pages read."""
FILES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/how-to").glob("*.md")]
PAGES = sorted((str(path.relative_to(ROOT)) for path in FILES), key=lambda page: (page in LAST, page))
"""Pages of the manual. Decision records (``docs/adr``) are left out: they describe one moment, and nobody runs them."""

MODEL = {"path": "/models/policy"}
PROMPTS = {
    "name": "a", "model": MODEL, "data": {"train": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 64, "max_updates": 9},
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "rl": PROMPTS,
    "evaluation": {
        "kind": "evaluation", "name": "a", "model": MODEL, "reward": PROMPTS["reward"],
        "data": {"eval": {"type": "addition"}},
    },
    "serving": {"kind": "serving", "name": "a", "model": MODEL},
    "online_rl": {
        "kind": "online_rl", "name": "a", "model": MODEL, "algorithm": {"type": "reinforce_pp"},
        "train": {"batch_size": 64, "max_lag": 2}, "online": {"metrics": {"accepted": {"type": "boolean"}}},
        "data": {"eval": {"type": "addition"}}, "reward": PROMPTS["reward"], "evaluation": {"every": 1},
    },
    "embodied": {
        "kind": "embodied", "name": "a", "policy": {"type": "gaussian"}, "algorithm": {"type": "ppo"},
        "environment": {"backend": "gymnasium", "task": "CartPole-v1", "horizon": 100},
        "train": {"batch_size": 64, "max_updates": 9},
    },
}  # fmt: skip
"""A valid job of each kind, to complete fences that show only one section of a job."""

GIGABYTES = "downloads gigabytes"
DOCKER = "needs Docker"
OTHER_HOSTS = "leaves out the addresses of other machines"
NOT_RUN = {
    "penstock up": "run by tests/e2e/test_local_stack.py",
    "penstock demo": "run by tests/e2e/test_demo.py",
    "penstock demo SHOW": "run by tests/e2e/test_demo.py",
    "penstock demo online": "run by tests/e2e/test_demo.py",
    "penstock demo online --hostile": "run by tests/e2e/test_demo.py",
    "penstock demo robot": "run by tests/e2e/test_demo.py",
    "penstock doctor": "run by tests/integration/test_doctor.py",
    "penstock sweep FILE": "run by tests/e2e/test_sweep.py",
    "pytest -n0 -m vllm": GIGABYTES,
    "python -S -c": "leaves out its program",
    "python3 -m venv": "leaves out its folder",
    "penstock submit examples/algorithms/opo.yaml --dry-run": "a file that the patches of its page add",
    "penstock amend JOB --set backend.type=megatron --set backend.tensor_parallel=2": (
        "needs two ranks; run by tests/e2e/test_backend_changes.py"
    ),
    "penstock dlq show JOB DEAD_LETTER": "needs a dead letter; run by tests/contract/front/test_views.py",
    "penstock dlq replay JOB DEAD_LETTER": "needs a dead letter; run by tests/contract/front/test_views.py",
    "penstock dlq drop JOB DEAD_LETTER": "needs a dead letter; run by tests/contract/front/test_views.py",
    "penstock quarantine show ITEM": "needs feedback that is held; run by tests/contract/feedback/test_clients.py",
    "penstock quarantine release ITEM": "needs feedback that is held; run by tests/contract/feedback/test_clients.py",
    "penstock quarantine drop ITEM": "needs feedback that is held; run by tests/contract/feedback/test_clients.py",
    "penstock ckpt promote JOB": "needs promotion; run by tests/contract/front/test_versions.py",
    "penstock ckpt promote JOB VERSION": "needs promotion; run by tests/contract/front/test_versions.py",
    "penstock backup /backups/2026-11-23": "run by tests/e2e/test_backup.py",
    "penstock restore /backups/2026-11-23 --data-dir /new": "run by tests/e2e/test_backup.py",
    "penstock up --data-dir /new": "run by tests/e2e/test_backup.py",
    "penstock submit examples/own-engine.yaml --follow": "run by tests/e2e/test_user_code.py",
    "penstock metrics own-engine reward/mean mismatch/logprob": "run by tests/e2e/test_user_code.py",
    "penstock why own-engine": "about the job before it; tests/e2e/test_user_code.py asks why",
    "make screenshots": "trains several jobs for minutes, and writes into the manual",
    'client.post("/feedback")': "leaves out the body",
    "class Ticket(BaseModel):": (
        "the agent here ends an answer after eight tokens; tests/contract/serving/test_forms.py parses one"
    ),
    "def score(prompt: str, completion: str, answer: str | None, row: dict, *, bonus: float = 0.0) -> float:": (
        "run by tests/e2e/test_user_code.py"
    ),
    "name: own-reward": "run by tests/e2e/test_user_code.py",
    "penstock submit job.yaml --follow": "run by tests/e2e/test_user_code.py",
    "def verify(secret: str, headers: dict[str, str], body: bytes) -> bool:": (
        "run by tests/contract/test_web_scorers.py"
    ),
}
"""First line of each snippet that ``tests/e2e/test_manual.py`` does not run, with the reason."""
NOT_RUN_LIKE = {
    r".*\bdocker .*": DOCKER,
    r"pip install .*": GIGABYTES,
    r"penstock .*\b(vllm|vllm_server|sglang)\b.*": GIGABYTES,
    r"\{ cat .*vllm.*": GIGABYTES,
    r"penstock engines install NAME": GIGABYTES,
    r"penstock sims install (metaworld|maniskill|libero)\b.*": GIGABYTES,
    r"penstock sims install (gymnasium|NAME.*)": "run by tests/integration/test_sims.py",
    r"python3 -m venv .* && .*": GIGABYTES,
    r"python -m penstock\.services\.(trainer|coordinator)": "a service, which `penstock up` starts",
    r"environment: .*sim_backend: physx_cuda.*": "needs an NVIDIA GPU: the submission is refused elsewhere",
    r"torchrun .*": OTHER_HOSTS,
    r"data: .* type: verifiers .*": "names an interpreter with the library verifiers, which downloads gigabytes",
    r"PENSTOCK_WORKER_ID=.*….*": OTHER_HOSTS,
    r"nats stream .*": "needs the command line of NATS",
    r"(\w+=\S+ )*pytest .*": "run by tests/repo/test_how_to.py",
    r"--- .*": "run by tests/repo/test_how_to.py",
}
"""Reasons for snippets whose first line matches a pattern."""
RUN_WHOLE = {"docs/how-to/own-model.md": "run by tests/e2e/test_own_model.py"}
"""Pages whose fences another test runs from the first to the last, with the name of that test."""

GRADE = """penstock grade grader.yaml --sample 3 --item '{"answer": "3"}'"""
PICTURES = "penstock submit examples/gym-pendulum-images-ppo.yaml"
TOKENS = "penstock submit examples/metaworld-reach-grpo-tokens.yaml"
FILLED = {
    "penstock grade FILE --sample TEXT --item JSON": GRADE,
    "penstock grade GRADER": GRADE,
    "penstock demo SHOW": "penstock demo robot",
    "penstock record FILE": "penstock record FILE --random",
    "penstock amend JOB": "penstock amend JOB --set train.max_updates=300",
    "penstock extend JOB": "penstock extend JOB --max-updates 3",
    "penstock keys create NAME": "penstock keys create NAME --scopes jobs:read",
    "penstock export JOB": "penstock export JOB --to exported",
    "penstock users consent USER": "penstock users consent eve --no-train",
    "penstock users erase USER": "penstock users erase eve",
    "penstock users status USER": "penstock users status eve",
    "penstock sims world-model train FILE": "penstock sims world-model train seen.demonstrations --out model",
    f"{PICTURES} --follow": f"{PICTURES} --dry-run",
    PICTURES: f"{PICTURES} --dry-run",
    f"{TOKENS} --set seed=1": f"{TOKENS} --set seed=1 --dry-run",
    "penstock metrics metaworld-reach-grpo-tokens success/rate eval/success --json": (
        "penstock metrics JOB success/rate eval/success --json"
    ),
}
"""Complete commands for usage lines that leave out an option, and cheaper ones for commands in ``results.md``.

``tests/e2e/test_embodied.py`` trains policies on images; the reader of ``embodied.md`` trains them in MetaWorld.
"""
LANGUAGES = {
    "python": "python", "bash": "command", "console": "command", "yaml": "yaml", "diff": "diff",
    "json": None, "text": None, "": None,
}  # fmt: skip
"""Kind of the snippets in each language of fences; None for bodies of requests, output and diagrams."""
PROGRAMS = "penstock|curl|make|pip|docker|python3?|pytest|sh|torchrun|nats|jq|git|kubectl|helm"
PARTS = re.compile(r"^```([^\n]*)\n(.*?)^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(rf"(\w+=(\$\([^)]*\)|\S+) )*({PROGRAMS}) |[A-Z_]+=\$\(")
CALL = re.compile(r"(client|job|penstock)(\.\w+)+\(")
UNLABELLED = re.compile(r"^(\$ )?(\w+=\S+ )*(penstock|curl|make|pip|docker) ", re.MULTILINE)


class Snippet(NamedTuple):
    """One thing in the manual that a reader can run.

    ``kind`` is python, command, mention (a command that leaves out its arguments), job (a whole job file), section
    (of a job file), diff or call. ``title`` is the file that a fence shows. ``inline`` marks a snippet in a sentence.
    """

    page: str
    kind: str
    text: str
    title: str = ""
    inline: bool = False

    @property
    def name(self) -> str:
        """Return the first line, of a command without extra blanks and comment; return a section whole, in one line."""
        if self.kind == "section":
            return " ".join(self.text.split())
        first = self.text.splitlines()[0]
        return " ".join(re.sub(r"\s#\s.*", "", first).split()) if self.kind == "command" else first

    @property
    def not_run(self) -> str:
        """Return the reason why ``tests/e2e/test_manual.py`` does not run this snippet, or ''."""
        if not self.inline and self.page in RUN_WHOLE:
            return RUN_WHOLE[self.page]
        like = (reason for pattern, reason in NOT_RUN_LIKE.items() if re.fullmatch(pattern, self.name))
        return NOT_RUN.get(self.name) or next(like, "")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@functools.cache
def snippets(page: str) -> tuple[Snippet, ...]:
    """Return all snippets of a page, in order."""
    return tuple(_snippets(page))


def _snippets(page: str) -> Iterator[Snippet]:
    for info, fence, inline in PARTS.findall(text_of(page)):
        if inline:
            if COMMAND.match(inline):
                whole = inline in FILLED or not is_mention(inline)
                yield Snippet(page, "command" if whole else "mention", inline, inline=True)
            elif CALL.match(inline):
                yield Snippet(page, "call", inline, inline=True)
            continue
        language, _, rest = info.partition(" ")
        title = "".join(re.findall(r'title="([^"]+)"', rest))
        kind = LANGUAGES[language]
        if kind == "command":
            for line in re.sub(r"\\\n|(?<=\|)\n", " ", fence).splitlines():
                if shlex.split(line, comments=True):
                    yield Snippet(page, "command", line.removeprefix("$ "))
        elif kind == "yaml":
            whole = re.search(r"^name:", fence, re.MULTILINE)
            yield Snippet(page, "job" if whole else "section", fence, title)
        elif kind is not None:
            yield Snippet(page, kind, fence, title)


def to_run(page: str) -> list[Snippet]:
    return [one for one in snippets(page) if not one.not_run and one.kind != "mention"]


# -- command lines ----------------------------------------------------------------------------------------------------


@functools.cache
def group() -> Any:
    """Return the command group of ``penstock``; cached, because typer reads all signatures for it."""
    return get_group(app)


def parsed(words: list[str]) -> None:
    """Parse a command line as ``penstock`` does, without running it. Raises TyperException or AssertionError."""
    command: Any = group()
    while isinstance(command, TyperGroup):
        assert words[:1] != [], "names no command"
        assert words[0] in command.commands, f"there is no command '{words[0]}'"
        command, words = command.commands[words[0]], words[1:]
    command.make_context("penstock", list(words))


def is_mention(text: str) -> bool:
    """Return True if a command is only mentioned: it lacks an argument or a verb, or offers several verbs (``a|b``)."""
    program, *words = shlex.split(text, comments=True)
    if program != "penstock":
        return (len(words) < 2 and program not in ("make", "sh")) or "|" in "".join(words)
    if any("|" in word for word in words):
        return True
    try:
        parsed(words)
    except AssertionError as error:
        return str(error) == "names no command"
    except TyperException as error:
        return type(error).__name__ in ("MissingParameter", "BadOptionUsage")  # their module is private
    return False


# -- job files --------------------------------------------------------------------------------------------------------


def whole_job(text: str) -> dict[str, Any]:
    """Return the job that a fence shows, or a valid job of its kind with the sections that the fence shows."""
    text = text.replace("{ ... }", "{type: object, properties: {item: {type: string}}, required: [item]}").replace(
        "[…]", "[...]"
    )
    data: dict[str, Any] = yaml.safe_load(text)
    if "observations" in data:  # it is below `environment`
        data = {"environment": {"tools": [{"type": "calculator"}], **data}}
    if "name" in data:
        return data
    base = BASES[kind_of(data)]
    return {**with_patch(base, data), **{name: data[name] for name in ("model",) if name in data}}


def kind_of(shown: dict[str, Any]) -> str:
    """Return the kind of job to which the sections in ``shown`` belong."""
    if "kind" in shown:
        return str(shown["kind"])
    environment = shown.get("environment", {})
    if "policy" in shown or {"task", "backend"} & environment.keys() or "demonstrations" in shown.get("warm_start", {}):
        return "embodied"
    return "online_rl" if "online" in shown or "baseline" in shown.get("algorithm", {}) else "rl"
