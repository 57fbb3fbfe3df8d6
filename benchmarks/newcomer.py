"""How long does the way of a newcomer take, from nothing to an agent that learnt from its users, in transformers?

    python3 benchmarks/newcomer.py [--out docs/results/newcomer.json] [--installed]

Every step is what a person would type, run here one after the other in one new directory, each with its seconds: the
installation into an empty environment; the demo; the same deployment again, in the background; its result served, and
asked by ``penstock chat``; OpenAI's SDK in an environment without Penstock, which asks the same; an agent that begins
where the demo began, asked through that SDK by eight threads that post to /feedback whether they accept each answer;
its newest checkpoint exported, and loaded by transformers. Any Python from 3.11 runs this file, which imports the
standard library alone.

The targets: the result adds right, at least GOAL of the agent's last WINDOW answers are accepted, the folder that was
exported answers as the agent did, and all of it takes at most LIMIT_S. Exits with 1 where one is missed.
``--installed``: skip both installations; the interpreter that runs this file has Penstock and openai.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THREADS = 8
WINDOW = 200
GOAL = 0.8
TALK_S = 330.0
LIMIT_S = 600.0
SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


class Way:
    """The steps so far, with the seconds of each."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.rows = directory, list[dict[str, Any]]()
        self.data = directory / "data"
        self.environment = {**os.environ, "PENSTOCK_DATA_DIR": str(self.data)}
        self.python = self.client = sys.executable

    def step(self, what: str, *command: str) -> str:
        """Run a step; returns its output. Raises SystemExit where it fails."""
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=self.environment)
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise SystemExit(f"{what}: exit {done.returncode}\n{done.stdout}")
        self.rows.append({"step": what, "seconds": round(seconds, 1)})
        print(f"{seconds:7.1f} s  {what}", flush=True)
        return done.stdout

    def penstock(self, what: str, *words: str) -> str:
        """A step that is a command of Penstock's."""
        return self.step(what, self.python, "-m", "penstock.cli", *words)

    def install(self, what: str, *packages: str) -> str:
        """Install packages into a new environment; returns its interpreter."""
        folder = Path(tempfile.mkdtemp(prefix="venv-", dir=self.directory))
        python = str(folder / "bin/python")
        make = f"{sys.executable} -m venv {folder} && {python} -m pip install -q {shlex.join(packages)}"
        self.step(what, "sh", "-c", make)
        return python


def walk(way: Way, *, installed: bool) -> list[str]:
    """All steps; which targets were missed."""
    data, missed = str(way.data), []
    if not installed:
        way.python = way.install("`pip install -e '.[demo]'`", "-e", f"{ROOT}[demo]")
    shown = json.loads(way.penstock("`penstock demo`", "demo", "--data-dir", data, "--json"))
    up = json.loads(way.penstock("`penstock up --detach`", "up", "--detach", "--json", "--data-dir", data))
    way.environment["PENSTOCK_URL"] = up["url"]
    try:
        way.penstock(
            "`penstock serve addition`", "serve", "addition", "--name", "adder", "--set", "sampling.temperature=0"
        )
        said = way.penstock("`penstock chat adder '3+4='`", "chat", "adder", "3+4=")
        missed += [f"the result of the demo says {said.strip()!r}"] if said.strip() != "7" else []
        if not installed:
            way.client = way.install("`pip install openai`", "openai>=3,<4")
        said = way.step("ask adder '3+4=' through OpenAI's SDK", way.client, __file__, "--ask", up["url"])
        missed += [f"through OpenAI's SDK, the result of the demo says {said.strip()!r}"] if said.strip() != "7" else []
        missed += learn(way, shown["job"], up["url"])
    finally:
        way.penstock("`penstock down`", "down")
    return missed


def learn(way: Way, demo: str, url: str) -> list[str]:
    """The steps of the agent; which targets were missed."""
    folder, missed = str(way.directory / "agent-model"), []
    begin = (f"model={{path: 'job:{demo}@initial'}}", "warm_start={steps: 0}")
    words = [word for each in begin for word in ("--set", each)]
    way.penstock("`penstock submit examples/agent.yaml`", "submit", str(ROOT / "examples/agent.yaml"), *words)
    way.penstock("`penstock wait agent --for running`", "wait", "agent", "--for", "running", "--timeout", "120")
    told = way.step(f"ask and judge until {GOAL:g} are accepted", way.client, __file__, "--talk", url)
    found = json.loads(told)
    print(f"           {found}", flush=True)
    missed += [f"accepted at last: {found['last']}"] if found["last"] < GOAL else []
    way.penstock("`penstock ckpt save agent`", "ckpt", "save", "agent")
    way.penstock("`penstock export agent@newest`", "export", "agent@newest", "--to", folder)
    loaded = way.step("load it in transformers, and ask it every sum", way.python, __file__, "--load", folder)
    right = float(loaded)
    missed += [f"in transformers {right:g} of the sums are right"] if right < GOAL else []
    way.rows.append({"step": "accepted", **found, "in_transformers": right})
    return missed


def client_of(url: str) -> Any:
    """Client of OpenAI's SDK for the deployment at ``url``."""
    import openai

    key = (Path(os.environ["PENSTOCK_DATA_DIR"]) / "api.key").read_text().strip()
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key)


def ask(url: str) -> str:
    """Answer of the demo's served result to a sum."""
    question = [{"role": "user", "content": "3+4="}]
    answer = client_of(url).chat.completions.create(model="adder", messages=question)
    return answer.choices[0].message.content or ""


def talk(url: str) -> dict[str, Any]:
    """Ask the agent sums and say whether its answers are right, until enough of the newest are, or time is up."""
    agent = client_of(url)
    newest: deque[bool] = deque(maxlen=WINDOW)
    writing = threading.Lock()
    first: list[bool] = []
    until = time.monotonic() + TALK_S
    versions = set()

    def is_done() -> bool:
        with writing:
            return time.monotonic() > until or (len(newest) == WINDOW and sum(newest) >= GOAL * WINDOW)

    def one(place: int) -> None:
        while not is_done():
            question, right = SUMS[(place := place + 37) % len(SUMS)]
            answer = agent.chat.completions.create(model="agent", messages=[{"role": "user", "content": question}])
            accepted = (answer.choices[0].message.content or "").strip() == right
            said = {"inference_id": answer.id, "metric_name": "accepted", "value": accepted}
            agent.post("/feedback", body=said, cast_to=object)
            with writing:
                versions.add(answer.model)
                newest.append(accepted)
                if len(first) < WINDOW:
                    first.append(accepted)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(THREADS)))
    return {"first": sum(first) / len(first), "last": sum(newest) / len(newest), "versions": len(versions)}


def load(folder: str) -> float:
    """Share of the sums that the exported model answers right, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for question, answer in SUMS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(said, skip_special_tokens=True).strip() == answer
    return right / len(SUMS)


def machine() -> str:
    """The processor, and how many cores of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unknown processor'}"


def system() -> str:
    """The distribution whose packages this process sees, with the version of Debian's where it is one."""
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:  # a system without the file os-release
        name = platform.platform()
    debian = Path("/etc/debian_version")
    version = f" ({debian.read_text().strip()})" if debian.is_file() else ""
    return f"{name}{version}, Python {platform.python_version()}"


def commit() -> str:
    """The commit of this checkout, marked where files were changed since; 'unknown' without a git repository."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description="Walk the way of a newcomer.")
    parser.add_argument("--out", type=Path, help="write the seconds to this JSON file")
    parser.add_argument("--installed", action="store_true", help="this interpreter has Penstock and openai")
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--talk", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--load", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(ask(args.ask))
        return 0
    if args.talk or args.load:
        print(json.dumps(talk(args.talk)) if args.talk else load(args.load))
        return 0
    began, load_before = time.monotonic(), os.getloadavg()[0]
    date, of_commit = datetime.now(UTC).date().isoformat(), commit()
    with tempfile.TemporaryDirectory(prefix="penstock-newcomer-") as directory:
        way = Way(Path(directory))
        missed = walk(way, installed=args.installed)
    seconds = round(time.monotonic() - began, 1)
    missed += [f"it took {seconds} s"] if seconds > LIMIT_S else []
    if args.out is not None:
        found = {
            "seconds": seconds, "machine": machine(), "root": system(), "date": date, "commit": of_commit,
            "load_before": round(load_before, 1), "steps": way.rows, "missed": missed,
        }  # fmt: skip
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{seconds:7.1f} s  in all; " + ("; ".join(missed) or "every target is met"))
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
