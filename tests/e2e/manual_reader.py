"""A reader of the manual: runs the snippets of a page against one deployment."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

import penstock
from penstock.shared.config.base import with_overrides
from penstock.shared.errors import Conflict
from penstock.shared.protocol.jobs import TERMINAL_PHASES
from tests.manual import BASES, FILLED, ROOT, Snippet, snippets, text_of, whole_job

KEY = "e2e-key"
AGENT = "agent"
"""Name of the job in ``examples/agent.yaml``."""
URL = "http://127.0.0.1:8000"
SMALLER: dict[str, tuple[str, ...]] = {
    "rl": ("train.max_updates=2", "train.batch_size=16", "evaluation.num_prompts=8", "limits.byte_budget=8388608"),
    "evaluation": ("evaluation.num_prompts=8", "limits.byte_budget=8388608"),
    "serving": (),
    "online_rl": ("limits.byte_budget=33554432",),
    "embodied": ("train.max_updates=2", "train.batch_size=8", "environment.num_envs=2", "environment.horizon=40",
                 "evaluation.episodes=2", "limits.byte_budget=67108864"),
}  # fmt: skip
"""Changes that make a job file small, by the kind of job."""
FEW = 4
"""Job files with at most this many updates stay as they are: with fewer, some metrics would have no value."""
FEWER = {
    r"--episodes \d+": "--episodes 4", r"--seeds \d+": "--seeds 1", r"--max-updates \d+": "--max-updates 3",
    r"rollback JOB \d+": "rollback JOB initial", r"rollout=\d": "rollout=2", r"--trainer-ranks \d": "--trainer-ranks 2",
}  # fmt: skip
"""Replacements that reduce the numbers in a command line, by pattern."""
ADDED = {
    "sims world-model train": "--epochs 2 --hidden 8",
    "bench ingest": "--seconds 0.5 --kills 0 --connections 4",
    "rm": "--yes",
}
"""Options that make a command small or keep it from asking for confirmation, by command."""
STAY = {"serving", "online_rl"}
"""Kinds of job that run until the end of the page, because later snippets send requests to them."""
RUNNING = ("amend", "scale", "why", "workers", "pause", "cancel", "resume", "ckpt save", "ckpt rollback")
"""Commands for which a reader starts a job that runs; most other commands get a job that has ended."""
SPENT = ("rm", "extend", "ckpt rm")
"""Commands that change a job for good; for each of them a reader submits a job of its own."""
PATHS = re.compile(r"(?<![\w.:/])/(models|data)(?=[/\s]|$)", re.MULTILINE)
"""Absolute folders in the manual; a reader has them below its own folder."""
SUMS = [(f"{i % 10}+{i // 10}=", str(i % 10 + i // 10)) for i in range(32)]
ROWS = [
    {"prompt": text, "question": text, "messages": [{"role": "user", "content": text}], "answer": answer,
     "tests": "assert 1 + 1 == 2", "rubric": "Is it right?"}
    for text, answer in SUMS
]  # fmt: skip
"""Rows of data with every field that the pages use."""
GRADER = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{sample.output_text}}",
          "reference": "{{item.answer}}"}  # fmt: skip


class Deployments:
    """Deployments that snippets start by ``penstock up``, with a home directory of their own."""

    def __init__(self, home: Path) -> None:
        self.home, self.started = home, set[Path]()
        home.mkdir(parents=True)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``penstock`` as a user would, in a process of its own. Raises AssertionError if the command fails."""
        left_out = ("PENSTOCK_URL", "PENSTOCK_API_KEY", "PENSTOCK_OPEN_LOOPBACK")
        env = {name: value for name, value in os.environ.items() if name not in left_out} | {"HOME": str(self.home)}
        sizes = {"PENSTOCK_EXPERIENCE_BYTES": str(64 << 20), "PENSTOCK_STREAM_BYTES": str(16 << 20)}
        command = [sys.executable, "-m", "penstock.cli", *words]
        done = subprocess.run(
            command, env=env | sizes, capture_output=True, text=True, timeout=200, check=False
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done

    def up(self, *words: str) -> None:
        """Start a deployment in the background on a free port, unless its folder already has one."""
        if "--trainer-ranks" in words:
            words = (*words, "--data-dir", str(self.home / "ranks"))
        folder = Path(words[words.index("--data-dir") + 1]) if "--data-dir" in words else self.home / ".penstock"
        if folder not in self.started:
            detach = () if "--detach" in words else ("--detach",)
            self.run("up", *words, *detach, "--port", "0")
            self.started.add(folder)

    def down(self) -> None:
        """Stop the deployment in the default folder."""
        self.run("down")
        self.started.discard(self.home / ".penstock")

    def close(self) -> None:
        for folder in list(self.started):
            self.run("down", "--data-dir", str(folder))
            self.started.discard(folder)


class Scene(NamedTuple):
    """Resources of all readers: a deployment, an ended job there, deployments of pages, a stub server, models."""

    stack: Any
    ended: str
    own: Deployments
    address: str
    models: Path


class Reader:
    """Runs the snippets of one page in the current folder; the Python snippets of a page share their variables."""

    def __init__(self, page: str, scene: Scene) -> None:
        self.page, (self.stack, self.ended, self.own, self.address, _) = page, scene
        self.folder, self.file, self.last_job = Path.cwd(), Path("job.yaml"), self.ended
        self.names: dict[str, Any] = {"penstock": penstock, "path": Path("train.jsonl")}
        self.opened: list[Any] = []

    def do(self, one: Snippet) -> None:
        """Run a snippet, then end the jobs that it leaves running, except jobs of a kind in ``STAY``."""
        known: dict[str, Callable[[str], None]] = {
            "python": self.python, "command": self.command, "job": self.job, "section": self.section, "call": self.call,
        }  # fmt: skip
        if one.title:
            Path(one.title).write_text(one.text, encoding="utf-8")
        known[one.kind](one.text)
        self.end_jobs(STAY)

    def end_jobs(self, but: set[str]) -> None:
        """End all running jobs, except those whose kind is in ``but``."""
        for record in self.stack.client.list(limit=100):
            if record.status.phase not in TERMINAL_PHASES and record.spec.get("kind", "rl") not in but:
                self.end(record.id)

    def end(self, job: str) -> None:
        """Cancel a job, unless it has ended, and wait for its end."""
        with suppress(Conflict):  # it has ended meanwhile
            self.stack.client.cancel(job, force=True)
        self.stack.finish(job)

    def close(self) -> None:
        """End the jobs and deployments of the page, and close the connections that its programs leave open."""
        import openai

        self.own.close()
        self.end_jobs(set())
        for one in {id(one): one for one in self.opened}.values():
            if isinstance(one, penstock.Job | openai.OpenAI):
                one.__exit__(None, None, None)

    def here(self, text: str) -> str:
        """Replace the folders and addresses in a text by those of this deployment."""
        text = PATHS.sub(lambda found: f"{self.folder}/{found[1]}", text).replace(URL, self.stack.stack.url)
        return re.sub(r"https://(models|scores)\.example", self.address, text)

    # -- Python ------------------------------------------------------------------------------------------------------

    def python(self, text: str) -> None:
        """Run a Python snippet. Serve the agent first if the snippet names it; wait until a fine-tuning job ends."""
        if f'"{AGENT}"' in text:
            self.serve_agent()
        if "fine_tuned_model" in text:
            self.names["job"] = self.names["client"].fine_tuning.jobs.retrieve(self.names["job"].id)
        self.define_names(text)
        code = self.here(text).replace("[…]", "messages")
        try:
            exec(compile(code, "snippet", "exec", dont_inherit=True), self.names)
        finally:
            self.opened += self.names.values()
        if "fine_tuning.jobs.create(" in text:
            self.stack.finish(self.names["job"].id)

    def define_names(self, text: str) -> None:
        """Define the names that a snippet takes for granted: imports, the key, messages, an OpenAI client."""
        from typing import Literal

        from openai import OpenAI
        from pydantic import BaseModel

        found = {"OpenAI": OpenAI, "BaseModel": BaseModel, "Literal": Literal, "KEY": KEY,
                 "messages": [{"role": "user", "content": "3+4="}]}  # fmt: skip
        for name, value in found.items():
            self.names.setdefault(name, value)
        if "client." in text and not re.search(r"\bclient =|as client:", text) and "client" not in self.names:
            self.names["client"] = OpenAI(base_url=f"{self.stack.stack.url}/v1", api_key=KEY)

    def call(self, text: str) -> None:
        """Evaluate a call of the client that a sentence contains."""
        names = {**self.names, "client": self.stack.client}
        self.opened.append(eval(text.replace('"NAME"', repr(self.ended)), names))

    # -- command lines -----------------------------------------------------------------------------------------------

    def command(self, text: str) -> None:
        """Run a command line of the page, with smaller numbers."""
        text = self.here(FILLED.get(text, text))
        for pattern, less in FEWER.items():
            text = re.sub(pattern, less, text)
        program = shlex.split(text, comments=True)[0]
        if program == "penstock":
            self.penstock(shlex.split(text, comments=True)[1:])
        elif program == "make":
            check_target(text)
        else:
            self.shell(text)

    def shell(self, text: str) -> None:
        """Run a line in a shell that has the key in ``KEY``; fail if a variable that the line sets is empty."""
        if "up.json" in text:  # that of the deployment, for this line only: `penstock down` must not find it
            shutil.copy(self.stack.data_dir / "up.json", Path.home() / ".penstock" / "up.json")
        answer = self.names.get("answer")
        text = text.replace("chatcmpl-…", getattr(answer, "id", "")).replace("/jobs/JOB", f"/jobs/{self.last_job}")
        text = re.sub(r"^curl ", "curl --fail-with-body --silent --show-error ", text)
        text = re.sub(r"^python ", f"{sys.executable} ", text)
        text = re.sub(" CHECKPOINT TARGET", lambda _: f" {self.checkpoint()} weights", text)
        if found := re.match(r"([A-Z_]+)=\$\(", text):
            text += f' && test -n "${found[1]}"'
        env = {**os.environ, "KEY": KEY}
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=120, check=False)
        (Path.home() / ".penstock" / "up.json").unlink(missing_ok=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        if "/v1/jobs" in text and done.stdout.startswith("{"):
            self.last_job = json.loads(done.stdout)["id"]

    def penstock(self, words: list[str]) -> None:
        """Run ``penstock``: ``up``, ``down`` and ``top`` in processes of their own, other commands in this process."""
        if words[0] == "up":
            self.own.up(*words[1:])
        elif words[0] == "down":
            self.own.down()
        elif words == ["top", "agent"]:
            self.top()
        else:
            self.cli(words)

    def cli(self, words: list[str]) -> None:
        """Run ``penstock`` in this process, with a value for each placeholder in capitals."""
        verb = next((verb for verb in (*RUNNING, *SPENT, *ADDED) if words[: len(verb.split())] == verb.split()), "")
        words = [self.stands_for(word, words, verb) for word in words]
        words += shlex.split(ADDED.get(verb, ""))
        if words[0] in ("backup", "restore") and "--data-dir" not in words:
            words += ["--data-dir", str(self.stack.data_dir if words[0] == "backup" else self.folder / "restored")]
        if words[:2] == ["submit", "examples/agent.yaml"]:
            self.end_agent()
        if words[0] in ("submit", "sweep"):
            words += self.smaller(Path(words[1]))
        if words[0] == "record":
            self.demonstrable(Path(words[1]))
            words += [] if "--episodes" in words else ["--episodes", "4"]
            words += ["--all"] if "--checkpoint" in words else []  # so small a job solves nothing
        if words[0] == "chat":
            self.serve_agent()
        done = self.stack.cli(*words)
        assert done.exit_code == 0, f"{words}\n{done.output}"
        if words[0] == "submit" and not {"--follow", "--dry-run"} & set(words):
            self.until_it_ends_or_serves(done.stdout.split()[0])

    def stands_for(self, word: str, words: list[str], verb: str) -> str:
        """Return the value that a reader would write for a placeholder in capitals, and any other ``word`` as it is."""
        job = re.compile(r"^(JOB|NAME|\$BEST)(?=@|$)")
        if job.match(word) and words[:2] not in (["keys", "create"], ["sims", "install"]):
            return job.sub(self.job_for(verb), word)
        more: dict[str, Callable[[], str]] = {
            "WHICH": lambda: "initial", "NAMES": lambda: "reward/mean",
            "WANTED": lambda: "rollout=1", "TEXT": lambda: "3+4=", "METRIC": lambda: "accepted",
            "VALUE": lambda: "true", "URL": lambda: self.address, "USER": lambda: "eve",
            "TARGET": lambda: self.target(words), "SOURCE": lambda: self.target(["backup"]),
            "PATH": lambda: "train.jsonl",
            "DIR": lambda: str(self.checkpoint() if words[0] == "record" else self.folder / "exported"),
            "ID": lambda: self.id_for(words[0]), "FILE": lambda: self.file_for(words),
            "MODEL": lambda: AGENT if words[0] == "chat" else f"{self.ended}@best",
        }  # fmt: skip
        return more[word]() if word in more else word

    def job_for(self, verb: str) -> str:
        """Return the job for a command: a new one that runs, a new one that has ended, or the shared ended one."""
        if verb in SPENT:
            job: str = self.stack.submit("train.max_updates=2", name="spare")
            self.stack.finish(job)
            return job
        if verb not in RUNNING:
            return self.ended
        job = self.stack.submit("train.max_updates=20000", "checkpoint.every=20000", name="running")
        self.stack.reach(job, 1)
        if verb == "resume":
            self.stack.client.pause(job)
            self.stack.until(lambda: self.stack.status(job).phase == "paused", "the pause")
        return job

    def target(self, words: list[str]) -> str:
        """Return the folder of a backup, or, for other commands, the id of a new answer that gets feedback."""
        if words[0] in ("backup", "restore"):
            return str(self.folder / "backup")
        self.serve_agent()
        return str(self.ask(AGENT).json()["id"])

    def checkpoint(self) -> Path:
        """Return the folder of the newest checkpoint of the last job of this page."""
        return Path(self.stack.data_dir / self.stack.client.checkpoints(self.last_job)[-1]["path"])

    def id_for(self, group: str) -> str:
        """Create an object for the commands of a ``group`` (file, key, webhook, feedback); return its id."""
        client = self.stack.client
        if group == "files":
            return str(client.files.upload(Path("train.jsonl")).id)
        if group == "keys":
            return str(client.keys.create("spare", ["jobs:read"]).id)
        if group == "webhooks":
            return str(client.webhooks.create(self.address).id)
        return str(client.feedback("accepted", True, inference=self.target([group])).feedback_id)

    def file_for(self, words: list[str]) -> str:
        """Return the path of a file of the kind that a command reads."""
        if words[0] == "record":
            return "cartpole.yaml"
        if words[:2] == ["files", "upload"]:
            return "train.jsonl"
        if words[:2] != ["feedback", "batch"]:
            return str(self.file)
        item = {"inference_id": self.target(words), "metric_name": "accepted", "value": True}
        Path("items.jsonl").write_text(json.dumps(item) + "\n")
        return "items.jsonl"

    def demonstrable(self, file: Path) -> None:
        """Write a missing job file for recording demonstrations: the first job of the page, or a small job."""
        if file.exists():
            return
        shown = [one for one in snippets(self.page) if one.kind == "job"]
        job = yaml.safe_load(shown[0].text) if shown else BASES["embodied"]
        goes_to = f"{self.folder}/data/pick-place.demonstrations" if shown else "seen.demonstrations"
        file.write_text(yaml.safe_dump({**job, "warm_start": {"demonstrations": goes_to, "epochs": 2}}))

    def top(self) -> None:
        """Check that ``penstock top agent`` first shows a running job, and that the job outlives the command."""
        command = [sys.executable, "-m", "penstock.cli", "top", "agent"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.terminate()
        assert "running" in line, line
        assert self.stack.client.find("agent").status.phase == "running"

    # -- job files ---------------------------------------------------------------------------------------------------

    def job(self, text: str) -> None:
        """Submit a job file, made small; wait until the job succeeds or serves."""
        self.file = Path(f"{yaml.safe_load(text)['name']}.yaml")
        self.file.write_text(self.here(text), encoding="utf-8")
        self.bring_code(text)
        for record in self.stack.client.list(name=self.file.stem):  # two cannot be served under one name
            if record.status.phase not in TERMINAL_PHASES:
                self.end(record.id)
        done = self.stack.cli("submit", str(self.file), *self.smaller(self.file))
        assert done.exit_code == 0, f"{text}\n{done.output}"
        self.until_it_ends_or_serves(done.stdout.split()[0])

    def section(self, text: str) -> None:
        """Dry-run a valid job with the sections that a page shows."""
        self.bring_code(text)
        job = whole_job(self.here(text).replace("device: cuda, ", ""))
        if job.get("kind", "rl") == "rl" and job["data"]["train"] == {"type": "addition"}:
            job["data"]["train"] = {"type": "file", "path": "./train.jsonl"}  # with the fields that scorers ask for
        shown = [one for one in snippets(self.page) if one.kind == "job"]
        if job.get("kind") == "embodied" and "environment" not in text and shown:
            job = {**yaml.safe_load(shown[0].text), **yaml.safe_load(self.here(text))}  # in the simulator of the page
        file = Path("section.yaml")
        file.write_text(self.here(yaml.safe_dump(job)), encoding="utf-8")
        done = self.stack.cli("submit", str(file), "--dry-run")
        assert done.exit_code == 0, f"{file.read_text()}\n{done.output}"

    def smaller(self, file: Path) -> list[str]:
        """Return options that make a job file small; change the folders in the file to those of this reader."""
        text = file.read_text(encoding="utf-8")
        model = re.search(r"/(data/[a-z]+-model)", text)
        if model and not (self.folder / model[1]).exists():
            self.world_model(model[0])
        file.write_text(self.here(text), encoding="utf-8")
        data = yaml.safe_load(text)
        if data.get("train", {}).get("max_updates", FEW + 1) <= FEW:
            return []
        changes = list(SMALLER[data.get("kind", "rl")])
        if data.get("environment", {}).get("image"):
            changes.append("environment.horizon=10")
        return [word for change in changes for word in ("--set", change)]

    def world_model(self, folder: str) -> None:
        """Train the world model in ``folder`` by the commands of docs/embodied.md, for other pages with its example."""
        commands = [one.text for one in snippets("docs/embodied.md")]
        trains = next(text for text in commands if text.endswith(f"--out {folder}"))
        records = next(text for text in commands if text.endswith(f"--to {trains.split()[4]}"))
        for text in (records, trains):
            self.command(text)

    def bring_code(self, text: str) -> None:
        """Write the code that a job names as a module of the workers: the snippet of the page that defines the name."""
        for module, name in re.findall(r"([a-z_.]+):([A-Za-z]\w*)", text):
            defined = re.compile(rf"^(class|def) {name}\b", re.MULTILINE)
            shown = [one.text for one in snippets(self.page) if one.kind == "python" and defined.search(one.text)]
            if module == "my_package.privacy":
                shown = ["def places(text):\n    return []\n"]
            if shown:
                file = self.stack.modules / (module.replace(".", "/") + ".py")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(shown[0], encoding="utf-8")

    def until_it_ends_or_serves(self, job: str) -> None:
        """Wait until a job succeeds or, if its kind serves, until it runs."""
        record = self.stack.client.get(job)
        self.last_job = record.id
        if record.spec.get("kind") in STAY:
            self.until_it_runs(job)
        else:
            record = self.stack.finish(job, 180)
            assert record.status.phase == "succeeded", record.status.message

    # -- agents ------------------------------------------------------------------------------------------------------

    def serve_agent(self) -> None:
        """Serve ``examples/agent.yaml``, unless the page serves an agent of this name; wait until it answers."""
        if any(row.name == AGENT and row.status.phase == "running" for row in self.stack.client.list(limit=100)):
            return
        spec = yaml.safe_load((ROOT / "examples/agent.yaml").read_text(encoding="utf-8"))
        job = self.stack.client.submit(with_overrides(spec, SMALLER["online_rl"])).id
        self.until_it_runs(job)
        self.stack.until(lambda: self.ask(AGENT).is_success, "the agent answers", 90)

    def end_agent(self) -> None:
        """Cancel the agent that an earlier snippet of the page made necessary: two jobs cannot serve one name."""
        for row in self.stack.client.list(limit=100):
            if row.name == AGENT and row.status.phase not in TERMINAL_PHASES:
                self.stack.client.cancel(row.id)
                self.stack.until(lambda job=row.id: self.stack.status(job).phase in TERMINAL_PHASES, "the agent's end")

    def ask(self, model: str) -> httpx.Response:
        """Send a chat request to a served model; return the reply."""
        body = {"model": model, "messages": [{"role": "user", "content": "3+4="}]}
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.stack.stack.url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def until_it_runs(self, job: str) -> None:
        """Wait until a job is in phase `running`."""

        def runs() -> bool:
            status = self.stack.status(job)
            assert status.phase not in TERMINAL_PHASES, (status.phase, status.message)
            return bool(status.phase == "running")

        self.stack.until(runs, f"{job} runs", 120, lambda: self.stack.client.why(job))


def check_target(text: str) -> None:
    """Check that the Makefile has the target, and that the program of its recipe has the options in ``ARGS``."""
    _, target, *variables = shlex.split(text)
    makefile = text_of("Makefile")
    found = re.search(rf"^{re.escape(target)}:[^=][^\n]*\n((\t[^\n]*\n)*)", makefile, re.MULTILINE)
    assert found is not None, f"there is no target '{target}'"
    for variable in variables:
        name, _, value = variable.partition("=")
        assert f"$({name})" in makefile, f"nothing reads {name}"
        sources = [text_of(path) for path in re.findall(r"benchmarks/\w+\.py", found[1])]
        for option in re.findall(r"--[\w-]+", value):
            assert any(f'"{option}"' in source for source in sources), f"{text}: nothing reads {option}"
