"""How long does the way of a newcomer take, from the demo to an agent that learnt from its users, in transformers?

    python benchmarks/newcomer.py [--out docs/results/newcomer.json] [--client PYTHON]

Every step is what a person would type, run here one after the other in one data directory, each with its seconds: the
demo; the same deployment again, in the background; its result served, and asked by ``penstock chat``; an agent that
begins where the demo began, asked through OpenAI's SDK by eight threads that post to /feedback whether they accept each
answer; its newest checkpoint exported, and loaded by transformers.

The targets: the result adds right, at least GOAL of the agent's last WINDOW answers are accepted, the folder that was
exported answers as the agent did, and all of it takes at most LIMIT_S. Exits with 1 where one is missed. ``--client``:
an interpreter with the package openai and nothing of Penstock (default: that of ``make clients-venvs
CLIENTS=openai``, else this one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THREADS = 8
WINDOW = 200
GOAL = 0.8
TALK_S = 240.0
LIMIT_S = 600.0
SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


class Way:
    """The steps so far, with the seconds of each."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.rows = directory, list[dict[str, Any]]()
        self.environment = {**os.environ, "PENSTOCK_DATA_DIR": str(directory)}

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
        return self.step(what, sys.executable, "-m", "penstock.cli", *words)


def walk(way: Way, client: str) -> list[str]:
    """All steps; which targets were missed."""
    folder = str(way.directory / "agent-model")
    missed = []
    shown = json.loads(way.penstock("`penstock demo`", "demo", "--data-dir", str(way.directory), "--json"))
    up = json.loads(
        way.penstock("`penstock up --detach`", "up", "--detach", "--json", "--data-dir", str(way.directory))
    )
    way.environment["PENSTOCK_URL"] = up["url"]
    try:
        way.penstock(
            "`penstock serve addition`", "serve", "addition", "--name", "adder", "--set", "sampling.temperature=0"
        )
        said = way.penstock("`penstock chat adder '3+4='`", "chat", "adder", "3+4=")
        missed += [f"the result of the demo says {said.strip()!r}"] if said.strip() != "7" else []
        begin = ("--set", f"model={{path: 'job:{shown['job']}@initial'}}", "--set", "warm_start={steps: 0}")
        way.penstock("`penstock submit examples/agent.yaml`", "submit", str(ROOT / "examples/agent.yaml"), *begin)
        way.penstock("`penstock wait agent --for running`", "wait", "agent", "--for", "running", "--timeout", "120")
        told = way.step("ask and judge until 0.8 are accepted", client, __file__, "--talk", up["url"])
        found = json.loads(told)
        print(f"           {found}", flush=True)
        missed += [f"accepted at last: {found['last']}"] if found["last"] < GOAL else []
        way.penstock("`penstock ckpt save agent`", "ckpt", "save", "agent")
        way.penstock("`penstock export agent@newest`", "export", "agent@newest", "--to", folder)
        right = float(
            way.step("load it in transformers, and ask it every sum", sys.executable, __file__, "--load", folder)
        )
        missed += [f"in transformers {right:g} of the sums are right"] if right < GOAL else []
        way.rows.append({"step": "accepted", **found, "in_transformers": right})
    finally:
        way.penstock("`penstock down`", "down")
    return missed


def talk(url: str) -> dict[str, Any]:
    """Ask the agent sums and say whether its answers are right, until enough of the newest are, or time is up."""
    import openai

    key = (Path(os.environ["PENSTOCK_DATA_DIR"]) / "api.key").read_text().strip()
    agent = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    newest: deque[bool] = deque(maxlen=WINDOW)
    first: list[bool] = []
    until = time.monotonic() + TALK_S
    versions = set()

    def is_done() -> bool:
        return time.monotonic() > until or (len(newest) == WINDOW and sum(newest) >= GOAL * WINDOW)

    def one(place: int) -> None:
        while not is_done():
            question, right = SUMS[(place := place + 37) % len(SUMS)]
            answer = agent.chat.completions.create(model="agent", messages=[{"role": "user", "content": question}])
            accepted = (answer.choices[0].message.content or "").strip() == right
            said = {"inference_id": answer.id, "metric_name": "accepted", "value": accepted}
            agent.post("/feedback", body=said, cast_to=object)
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


def client_python() -> str:
    """The interpreter of OpenAI's SDK alone, where it was made."""
    made = Path(os.environ.get("PENSTOCK_CLIENTS_DIR") or ROOT / ".clients") / "openai/bin/python"
    return str(made) if made.exists() else sys.executable


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description="Walk the way of a newcomer.")
    parser.add_argument("--out", type=Path, help="write the seconds to this JSON file")
    parser.add_argument("--client", default=client_python(), help="interpreter with openai")
    parser.add_argument("--talk", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--load", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.talk or args.load:
        print(json.dumps(talk(args.talk)) if args.talk else load(args.load))
        return 0
    began, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="penstock-newcomer-") as directory:
        way = Way(Path(directory))
        missed = walk(way, args.client)
    seconds = round(time.monotonic() - began, 1)
    missed += [f"it took {seconds} s"] if seconds > LIMIT_S else []
    if args.out is not None:
        found = {"seconds": seconds, "load_before": round(load_before, 1), "steps": way.rows, "missed": missed}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{seconds:7.1f} s  in all; " + ("; ".join(missed) or "every target is met"))
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
