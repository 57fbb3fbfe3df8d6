"""Jobs that vLLM decodes, through the whole system: rollout workers run in its interpreter, or start its server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import psutil
import pytest

from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.protocol.events import BatchTrained
from tests.processes import is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1200)]

UPDATES = 30
HEADERS = {"authorization": "Bearer e2e-key"}
MISMATCH = 1e-4
"""Largest mean difference of log-probs between vLLM and the trainer, in float32."""


VLLM = {"engine": "vllm", "kv_cache_gib": 0.25}
SERVER = {**VLLM, "engine": "vllm_server"}
HEADS = ("model.config.num_heads=1", "model.config.num_kv_heads=1")
"""Attention heads of size 32, the smallest that vLLM supports on a CPU."""
TOOL = Path(__file__).parents[2] / "examples" / "gsm8k-tool.yaml"
TOOL_CHANGES = (
    "model.config.num_layers=2", "model.config.num_heads=2", "model.config.num_kv_heads=2", "warm_start.steps=45",
    "warm_start.learning_rate=0.004", "train.max_updates=4", "train.batch_size=64", "train.minibatches=1",
    "train.draw_timeout_s=600", "checkpoint.every=4", "evaluation.every=0", "limits.byte_budget=33554432",
)  # fmt: skip
LIVE: dict[str, Any] = {
    "kind": "online_rl", "name": "live", "rollout": VLLM, "algorithm": {"type": "reinforce_pp"},
    "train": {"batch_size": 8, "max_lag": 2},
    "online": {"metrics": {"liked": {"type": "boolean", "when_true": 1.0, "when_false": -1.0}}, "max_wait_s": 2},
    "data": {"eval": {"type": "addition", "digits": 1, "num_rows": 8}, "prompt": {"max_tokens": 8}},
    "evaluation": {"every": 1, "num_prompts": 8, "greedy": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def stack(
    deploy: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, python_with: Callable[[str], Path]
) -> Iterator[Any]:
    """Stack for all tests here, whose rollout workers run in vLLM's interpreter with a torch of its own."""
    deployment = deploy(tmp_path_factory.mktemp("vllm") / "run", pythons={"rollout": python_with("vllm")})
    deployment.ready_s = 400.0
    with deployment as found:
        yield found


def test_a_job_learns_from_what_vllm_writes(stack: Any, make_job: Callable[..., Any]) -> None:
    check_learning(stack, make_job, VLLM)


def test_a_job_learns_from_what_the_server_of_vllm_writes(
    deploy: Callable[..., Any], make_job: Callable[..., Any], tmp_path: Path, python_with: Callable[[str], Path]
) -> None:
    """Rollout workers use this interpreter, as after ``penstock up --engine vllm_server``; one server is killed."""
    python = python_with("vllm")
    deployment = deploy(tmp_path / "run")
    deployment.environment["PENSTOCK_VLLM_PYTHON"] = str(python)
    with deployment as stack:
        check_learning(stack, make_job, SERVER, meanwhile=partial(end_server, stack))


def end_server(stack: Any, job: str) -> None:
    """Kill the vLLM server of the rollout worker in mid-job, and wait until all processes of the server have ended."""
    stack.until(lambda: stack.status(job).step >= 5, "five updates", 400, lambda: stack.client.why(job))
    family = psutil.Process(stack.pid("rollout-0")).children(recursive=True)
    server = next(process for process in family if "vllm.entrypoints.openai.api_server" in process.cmdline())
    server.kill()
    stack.until(
        lambda: not any(is_alive(process) for process in family),
        "the end of every process of the server", 120, lambda: str(family),
    )  # fmt: skip


def check_learning(
    stack: Any, make_job: Callable[..., Any], rollout: dict[str, Any], meanwhile: Callable[[str], None] | None = None
) -> None:
    """Train a job; check rewards, log-probs, audit and version labels. Call ``meanwhile`` with the id of the job."""
    job = stack.client.submit(
        make_job(
            f"train.max_updates={UPDATES}", "train.draw_timeout_s=600", "train.batch_size=64",
            "optimizer.learning_rate=1e-3", *HEADS, rollout=rollout,
        )
    ).id  # fmt: skip
    if meanwhile is not None:
        meanwhile(job)
    assert stack.finish(job, 900).status.step == UPDATES
    series = stack.client.metrics(job, names="reward/mean,mismatch/logprob")["series"]
    rewards = series["reward/mean"]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1, rewards
    assert max(value for value in series["mismatch/logprob"] if value is not None) < MISMATCH
    stack.check_audit(job)
    digests = {event.version: event.digest for event in stack.ledger(job) if isinstance(event, BatchTrained)}
    spans = [span for group in stack.groups(job).values() for span in labels(group)]
    assert len({version for version, _ in spans}) > 2, "vLLM followed the versions"
    assert all(digests[version].startswith(weights) for version, weights in spans if version in digests)


def test_completions_of_vllm_call_a_tool(stack: Any, tmp_path: Path) -> None:
    """The calculator's results stand between two turns of vLLM and have no log-prob."""
    rows = [{"question": "?", "answer": f"<<{a}*{b}={a * b}>>{a * b}"} for a in range(2, 60) for b in range(2, 10)]
    path = tmp_path / "annotations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = with_overrides(load_yaml(TOOL), TOOL_CHANGES) | {"rollout": VLLM}
    for source in (spec["data"]["train"], spec["data"]["eval"]):
        source.pop("exclude_path", None)
        source["path"] = str(path)
    job = stack.client.submit(spec).id
    assert stack.finish(job, 600).status.step == 4
    series = stack.client.metrics(job, names="tokens/observed,mismatch/logprob")["series"]
    assert min(value for value in series["tokens/observed"] if value is not None) > 0
    assert max(value for value in series["mismatch/logprob"] if value is not None) < MISMATCH
    for group in stack.groups(job).values():
        assert not group.failed.any()
        assert not group.logprobs[group.mask == 0].any()
    stack.check_audit(job)


def test_vllm_answers_live_requests_and_its_answers_are_trained(stack: Any, make_job: Callable[..., Any]) -> None:
    job = stack.client.submit(make_job(*HEADS, **LIVE)).id
    with httpx.Client(base_url=stack.stack.url, headers=HEADERS, timeout=120) as http:

        def ask(**more: Any) -> httpx.Response:
            body = {"model": "live", "messages": [{"role": "user", "content": "1+2="}], **more}
            return http.post("/v1/chat/completions", json=body)

        stack.until(lambda: ask().is_success, "an answer", 400, lambda: stack.client.why(job))
        check_forms_of_answers(ask)
        stack.until(partial(judged, http, ask, stack, job), "three updates", 300, lambda: stack.client.why(job))
        newest = ask().json()
        assert int(newest["model"].rpartition("@")[2]) > 0, "vLLM serves what was trained"
    series = stack.client.metrics(job, names="eval/greedy,mismatch/logprob")["series"]
    assert [value for value in series["eval/greedy"] if value is not None], "held-out prompts were answered"
    assert max(value for value in series["mismatch/logprob"] if value is not None) < MISMATCH
    stack.client.cancel(job)
    stack.finish(job, 120)
    stack.check_audit(job)


def test_a_checkpoint_is_deployed_on_vllm(stack: Any, make_job: Callable[..., Any], tmp_path: Path) -> None:
    """Every engine writes the same greedy answer. Workers in vLLM's interpreter start its server with that interpreter.

    vLLM also loads the folder that ``penstock export`` writes.
    """
    trained = stack.client.submit(make_job("name=small", "train.max_updates=1", *HEADS)).id
    assert stack.finish(trained, 300).status.phase == "succeeded"
    exported, checkpoint = tmp_path / "exported", "job:small@final"
    made = stack.cli("export", "small", "--to", str(exported))
    assert made.exit_code == 0, made.output
    texts = {}
    for name, rollout, path in (
        ("embedded", {}, checkpoint), ("vllm", VLLM, checkpoint), ("server", SERVER, checkpoint),
        ("exported", VLLM, str(exported)),
    ):  # fmt: skip
        sampling = {"max_new_tokens": 6}  # a folder has no job whose sampling fits its 32 tokens
        deployed = {
            "kind": "serving", "name": f"by-{name}", "model": {"path": path}, "rollout": rollout, "sampling": sampling,
        }  # fmt: skip
        job = stack.client.submit(deployed).id
        body = {"model": f"by-{name}", "prompt": "1+2=", "max_tokens": 6, "temperature": 0}
        with httpx.Client(base_url=stack.stack.url, headers=HEADERS, timeout=120) as http:
            ask = partial(http.post, "/v1/completions", json=body)
            stack.until(lambda ask=ask: ask().is_success, "an answer", 400, partial(stack.client.why, job))
            texts[name] = ask().json()["choices"][0]["text"]
        stack.client.cancel(job)
        stack.finish(job, 120)
    assert texts["vllm"] == texts["server"] == texts["embedded"]
    assert texts["exported"] == texts["vllm"]


@pytest.mark.parametrize("rollout", [VLLM, SERVER], ids=["in process", "server"])
def test_a_job_says_why_vllm_cannot_compute_its_model(
    stack: Any, make_job: Callable[..., Any], rollout: dict[str, Any]
) -> None:
    job = stack.client.submit(make_job("name=narrow", rollout=rollout)).id
    stack.until(lambda: "computes attention heads of 32" in str(stack.client.why(job)), "the reason", 300)
    stack.client.cancel(job, checkpoint=False)
    stack.finish(job, 120)


def check_forms_of_answers(ask: Callable[..., httpx.Response]) -> None:
    """Check that streams, choices and log-probs work as with the embedded engine, and that a schema is refused."""
    several = ask(n=2, seed=5, logprobs=True, top_logprobs=2, max_tokens=4).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    tokens = several["choices"][0]["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    streamed = ask(seed=5, stream=True, max_tokens=4)
    pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert text == several["choices"][0]["message"]["content"], "the same seed"
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}
    refused = ask(response_format=schema)
    assert refused.status_code == 400, refused.text
    assert "rollout.engine 'vllm' keeps no answer to a form" in refused.text
    assert ask(top_p=0.5).is_success


def judged(http: httpx.Client, ask: Callable[..., httpx.Response], stack: Any, job: str) -> bool:
    """Post feedback on some answers; return True once the policy has made three updates."""
    for number in range(8):
        answer = ask(messages=[{"role": "user", "content": f"{number}+1="}]).json()
        liked = answer["choices"][0]["message"]["content"].startswith(("0", "1", "2", "3", "4"))
        body = {"inference_id": answer["id"], "metric_name": "liked", "value": liked}
        assert http.post("/v1/feedback", json=body).status_code == 202
    return bool(stack.status(job).step >= 3)


def labels(group: Any) -> list[tuple[int, str]]:
    """Return version and short weight digest of each span of a group."""
    return [(int(row[1]), weights) for row, weights in zip(group.spans, group.weights, strict=True)]
