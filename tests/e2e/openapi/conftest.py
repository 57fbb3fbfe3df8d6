"""A deployment with objects for every operation of the API: jobs, conversations, feedback, files, dead letters."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from penstock.local.ports import free_ports
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.video import Video, video_headers
from penstock.shared.protocol.jobs import TERMINAL_PHASES

KEY = "e2e-key"
Call = dict[str, Any]
GRADER = {"type": "string_check", "name": "same", "operation": "eq", "input": "{{sample.output_text}}",
          "reference": "{{item.answer}}"}  # fmt: skip
ROWS = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
LIVE = {
    "kind": "online_rl",
    "name": "fuzzed",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {
        "metrics": {"liked": {"type": "boolean"}, "score": {"type": "float", "clip": [0, 1]}},
        "max_wait_s": 3600, "hold_s": 10, "quarantine": {"min_items": 10},
    },
}  # fmt: skip
"""Eight items of feedback make an update. After ten equal values of a source a different value is quarantined."""
USUAL, UNUSUAL = 10, 18


class Front:
    """Client of one coordinator that knows a successful request for each operation.

    ``ids`` holds objects that stay, by path parameter. For an operation that uses an object up, the client creates one.
    """

    def __init__(
        self, stack: Any, url: str, headers: dict[str, str], ids: dict[str, Any], jobs: dict[str, str]
    ) -> None:
        self.stack, self.url, self.headers = stack, url, headers
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)
        self.ids, self.jobs = ids, jobs
        self._taken: set[str] = set()
        self._new_objects: dict[str, Callable[[], Call]] = {
            "DELETE /v1/keys/{key_id}": lambda: {"key_id": self.new("/v1/keys", self._key())},
            "DELETE /v1/files/{file_id}": lambda: {"file_id": self.upload()},
            "DELETE /v1/webhooks/{webhook_id}": lambda: {"webhook_id": self.new("/v1/webhooks", self._hook())},
            "DELETE /v1/jobs/{job_id}": lambda: {"job_id": self.ended()},
            "DELETE /v1/jobs/{job_id}/checkpoints/{number}": lambda: {"number": self.older_checkpoint()},
            "DELETE /v1/jobs/{job_id}/dead-letters/{letter}": lambda: {"letter": self.dead_letter()},
            "POST /v1/jobs/{job_id}/dead-letters/{letter}/replay": lambda: {"letter": self.dead_letter()},
            "POST /v1/jobs/{job_id}/extend": lambda: {"job_id": self.succeeded()},
            "POST /v1/jobs/{job_id}/cancel": lambda: {"job_id": self.new("/v1/jobs", self._job())},
            "GET /v1/jobs/{job_id}/operations/{operation}": lambda: {"operation": self.operation()},
            "GET /v1/jobs/{job_id}/videos/{name}": lambda: {"name": self.video()},
            "POST /v1/jobs/{job_id}/resume": lambda: {"job_id": self.paused("/v1/jobs", self._job())},
            "POST /v1/fine_tuning/jobs/{job_id}/cancel": lambda: {"job_id": self.tuning_job()},
            "POST /v1/fine_tuning/jobs/{job_id}/resume": lambda: {"job_id": self.tuning_job()},
            "POST /v1/episodes/{episode}/end": lambda: {"episode": self.new("/v1/episodes", {"model": "fuzzed"})},
            "POST /v1/feedback/{feedback_id}/retract": lambda: {"feedback_id": self.feedback()},
            "POST /v1/jobs/{job_id}/quarantine/{item}/release": lambda: {"item": self.quarantined()},
            "POST /v1/jobs/{job_id}/quarantine/{item}/drop": lambda: {"item": self.quarantined()},
            "POST /v1/quarantine/{item}/release": lambda: {"item": self.quarantined()},
            "POST /v1/quarantine/{item}/drop": lambda: {"item": self.quarantined()},
            "DELETE /v1/users/{user}/data": lambda: {"user": f"leaver-{uuid.uuid4().hex[:8]}"},
        }

    # -- what an operation needs -------------------------------------------------------------------------------------

    def path_parameters(self, operation: str) -> Call:
        """Return path parameters with which an operation (``GET /v1/...``) finds an object."""
        known = {**self.ids, "job_id": self.job_of(operation)}
        if operation in self._new_objects:
            known |= self._new_objects[operation]()
        return {name: known[name] for name in re.findall(r"{(\w+)}", operation)}

    def job_of(self, operation: str) -> str:
        """Return the job for an operation: one that has the necessary objects and that the operation may change."""
        for pattern, job in {
            r".* /v1/fine_tuning/": "tuned",
            r".*/(dead-letters|operations|promote|rollback|scale)": "spare",
            r"POST .*/(checkpoints|pause)|PATCH": "spare",
            r".*/(feedback|quarantine)": "live",
        }.items():
            if re.match(pattern, operation):
                return self.jobs[job]
        return self.jobs["done"]

    def call(self, operation: str) -> Call:
        """Return query, body and media type with which an operation succeeds."""
        about = {"inference_id": self.ids["interaction"], "metric_name": "liked"}
        chat = {"model": "fuzzed", "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
        tuning = {"grader": GRADER, "model_sample": "2", "item": ROWS[0]}
        path = operation.partition(" ")[2].removeprefix("/e/{episode_id}").replace("/alpha/", "/").replace(
            "/v1/fine_tuning/graders", "/v1/graders"
        )  # fmt: skip
        bodies: dict[str, Any] = {
            "/v1/chat/completions": chat,
            "/v1/completions": {"model": "fuzzed", "prompt": ["1+2=", "3+4="], "max_tokens": 4, "logprobs": 1},
            "/v1/episodes": {"model": "fuzzed", "key": {"expires_in_s": 60}},
            "/v1/episodes/{episode}/keys": {"expires_in_s": 60},
            "/v1/feedback": {**about, "value": True},
            "/feedback": {**about, "value": True},
            "/v1/feedback/batch": [{**about, "value": False}, {**about, "metric_name": "score", "value": 0.5}],
            "/v1/feedback/tokens": about,
            "/v1/files": {"file": _lines(), "purpose": "fine-tune"},
            "/v1/files/code": {"source": "def score(prompt, completion, answer, row):\n    return 1.0\n"},
            "/v1/fine_tuning/jobs": self._tuning(),
            "/v1/graders/run": tuning,
            "/v1/graders/validate": {"grader": GRADER},
            "/v1/jobs": self._job(),
            "/v1/jobs/{job_id}": {"train": {"max_updates": 999}},
            "/v1/jobs/{job_id}/extend": {"max_updates": 3},
            "/v1/jobs/{job_id}/promote": {"version": 0},
            "/v1/jobs/{job_id}/replay": {},
            "/v1/jobs/{job_id}/rollback": {"checkpoint": 0},
            "/v1/jobs/{job_id}/scale": {"pool": "rollout", "replicas": 1},
            "/v1/keys": self._key(),
            "/v1/models/{model}/promote": {"version": 0},
            "/v1/models/{model}/rollback": {"version": 0},
            "/v1/users/{user}/consent": {"train": True},
            "/v1/webhooks": self._hook(),
            "/v1/webhooks/{webhook_id}": {"description": "changed"},
        }
        query = {"GET /v1/episodes": {"model": "fuzzed"}, "PATCH /v1/jobs/{job_id}": {"wait": 0}}
        found: Call = {"query": query.get(operation, {})}
        if not operation.startswith(("GET", "DELETE")) and path in bodies:
            found["body"] = bodies[path]
            found["media_type"] = "multipart/form-data" if path == "/v1/files" else "application/json"
        return found

    def known_values(self, operation: str) -> dict[str, Any]:
        """Return values for fields that name objects: other values would only test that unknown names are refused."""
        interaction = self.ids["interaction"]
        return {
            "model": "tiny" if "fine_tuning" in operation else "fuzzed", "training_file": self.ids["file_id"],
            "inference_id": interaction, "chosen": interaction, "rejected": self.ids["other"],
            "episode_id": self.ids["episode"], "metric_name": "liked", "job": self.jobs["live"],
        }  # fmt: skip

    # -- creation of objects -------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """Send a POST that must succeed; return the body of the reply."""
        reply = self.http.post(path, json=body, **more)
        assert reply.is_success, (path, reply.status_code, reply.text)
        return reply.json()

    def get(self, path: str) -> Any:
        """Send a GET that must succeed; return the body of the reply."""
        reply = self.http.get(path)
        assert reply.is_success, (path, reply.status_code, reply.text)
        return reply.json()

    def new(self, path: str, body: Any) -> str:
        """Create an object by POST; return its id."""
        return str(self.post(path, body)["id"])

    def upload(self) -> str:
        """Upload a file; return its id."""
        files = {"file": ("rows.jsonl", _lines())}
        reply = self.http.post("/v1/files", files=files, data={"purpose": "fine-tune"})
        assert reply.is_success, reply.text
        return str(reply.json()["id"])

    def tuning_job(self) -> str:
        """Create a job with the fine-tuning API and pause it; return its id."""
        return self.paused("/v1/fine_tuning/jobs", self._tuning())

    def paused(self, path: str, body: Any) -> str:
        """Create a job and request its pause; return its id."""
        job = self.new(path, body)
        self.post(f"/v1/jobs/{job}/pause")
        return job

    def ended(self) -> str:
        """Create a job and end it; return its id."""
        job = self.new("/v1/jobs", self._job())
        self.end(job)
        self.get(f"/v1/jobs/{job}?wait=60")
        return job

    def succeeded(self) -> str:
        """Create a job and wait until it has made its two updates; return its id."""
        job = self.new("/v1/jobs", self._job())
        self.stack.finish(job)
        return job

    def end(self, job: str) -> None:
        """Cancel a job at once, unless it has ended."""
        reply = self.http.post(f"/v1/jobs/{job}/cancel?force=true")
        assert reply.status_code in (202, 409), reply.text

    def chat(self, **more: Any) -> str:
        """Send a chat request; return the id of the answer."""
        body = {"model": "fuzzed", "messages": [{"role": "user", "content": "1+2="}], **more}
        return str(self.post("/v1/chat/completions", body)["id"])

    def feedback(self, metric: str = "liked", value: Any = True, about: str = "") -> str:
        """Post feedback on an answer; return the id of the feedback."""
        body = {"inference_id": about or self.ids["interaction"], "metric_name": metric, "value": value}
        return str(self.post("/v1/feedback", body)["feedback_id"])

    def quarantined(self) -> str:
        """Return a quarantined item that no earlier call returned: the list may still contain an item just dropped."""
        listed = [str(row["feedback_id"]) for row in self.get(f"/v1/jobs/{self.jobs['live']}/quarantine")["data"]]
        item = next(one for one in reversed(listed) if one not in self._taken)
        self._taken.add(item)
        return item

    def older_checkpoint(self) -> int:
        """Return the number of a checkpoint that may be deleted: any but the newest."""
        rows = self.get(f"/v1/jobs/{self.jobs['done']}/checkpoints")["data"]
        return max(int(row["number"]) for row in rows if row["available"] and not row["newest"])

    def operation(self) -> str:
        """Start an operation and return its id: a job lists only its newest operations."""
        return self.new(f"/v1/jobs/{self.jobs['spare']}/scale", {"pool": "rollout", "replicas": 1})

    def dead_letter(self) -> int:
        """Publish a dead letter that stands for a draw; return its id."""
        job = self.jobs["spare"]
        headers = {"Penstock-Stream": "TICKETS", "Penstock-Sequence": "1", "Penstock-Reason": "max deliveries",
                   "Penstock-Attempts": "3", "Penstock-Draw": "0.0"}  # fmt: skip
        self.stack.on_bus(lambda bus: bus.publish(subjects.dead(job), b"unreadable", headers=headers))
        return int(self.get(f"/v1/jobs/{job}/dead-letters?limit=100")["data"][-1]["id"])

    def video(self) -> str:
        """Publish a video; return its name."""
        job, film = self.jobs["done"], Video(name="1-2.mp4", version=1, reset_id=2)
        headers = video_headers(film)
        self.stack.on_bus(lambda bus: bus.publish(subjects.videos(job), b"\0\0\0\x18ftypmp42", headers=headers))
        return film.name

    def _job(self) -> Any:
        return json.loads(self.ids["job_file"])

    def _tuning(self) -> Any:
        method = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 4}}}
        return {"model": "tiny", "training_file": self.ids["file_id"], "method": method, "seed": 3}

    @staticmethod
    def _key() -> Any:
        return {"name": "made", "scopes": ["jobs:read"], "expires_in_s": 600}

    @staticmethod
    def _hook() -> Any:
        return {"url": "http://127.0.0.1:9/"}


def _lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.fixture(scope="module")
def seeded(stack: Any, make_job: Any) -> Iterator[Front]:
    """Client of the deployment's own coordinator, which asks for keys; creates the objects once for all tests."""
    spare, short = make_job("train.max_updates=1000", name="spare"), make_job("train.max_updates=2")
    headers, ids = {"Authorization": f"Bearer {KEY}"}, {"job_file": json.dumps(short)}
    job_ids = {"done": stack.submit("train.max_updates=16", "checkpoint.every=1", "checkpoint.keep=20")}
    front = Front(stack, stack.stack.url, headers, ids, job_ids)
    with front.http:
        online = {**make_job(), **LIVE}
        job_ids["live"] = front.new("/v1/jobs", {k: v for k, v in online.items() if k not in ("data", "reward")})
        stack.until(lambda: stack.status(job_ids["live"]).phase == "running", "the job runs")
        _talk(front)
        done = stack.finish(job_ids["done"])
        assert done.status.phase == "succeeded", done.status
        job_ids["spare"] = front.paused("/v1/jobs", spare)
        _fill(front)
        job_ids["tuned"] = front.tuning_job()
        for name in ("spare", "tuned"):
            stack.until(lambda job=job_ids[name]: stack.status(job).phase == "paused", f"the pause of {name}")
        _await_statuses(front)
        yield front
        _clear(front)


def _clear(front: Front) -> None:
    """End every job, and delete webhooks and keys, which would affect other tests."""
    for record in front.stack.client.list():
        if record.status.phase not in TERMINAL_PHASES:
            front.end(record.id)
    for kind in ("webhooks", "keys"):
        for row in front.get(f"/v1/{kind}")["data"]:
            front.http.delete(f"/v1/{kind}/{row['id']}").raise_for_status()


def _talk(front: Front) -> None:
    """Create answers, an episode, and feedback on them."""
    answers = [front.chat(user="someone") for _ in range(2)]
    front.ids |= {"interaction": answers[0], "other": answers[1], "model": "fuzzed", "user": "someone"}
    episode = front.new("/v1/episodes", {"model": "fuzzed", "tags": {"a": "b"}})
    front.ids |= {"episode": episode, "episode_id": episode}
    front.chat(metadata={"episode_id": episode})
    for value in [0.5] * USUAL + [1.0] * UNUSUAL:
        answer = front.chat()
        front.feedback("score", value, answer)
        front.feedback(about=answer)
    front.ids["feedback_id"] = front.feedback("score", 0.5, answers[0])


def _fill(front: Front) -> None:
    """Create the other objects that have ids."""
    job = front.jobs["done"]
    newest = front.get(f"/v1/jobs/{job}/checkpoints")["data"][-1]
    file = newest["files"][0]
    sample = front.get(f"/v1/jobs/{job}/samples?limit=1")["data"][0]
    front.ids |= {
        "number": newest["number"], "name": file["name"], "sha256": file["sha256"],
        "sample_id": sample["href"].rpartition("/")[2], "file_id": front.upload(), "letter": str(front.dead_letter()),
        "key_id": front.new("/v1/keys", {"name": "kept", "scopes": ["jobs:read"], "models": None}),
        "webhook_id": front.new("/v1/webhooks", {"url": "http://127.0.0.1:9/", "job": job}),
    }  # fmt: skip
    front.http.delete("/v1/users/leaver/data").raise_for_status()
    front.ids["user"] = "leaver"


def _await_statuses(front: Front) -> None:
    """Wait until some feedback is quarantined and some is trained."""
    path = f"/v1/jobs/{front.jobs['live']}/quarantine"
    front.stack.until(lambda: len(front.get(path)["data"]) >= UNUSUAL, "quarantined feedback")
    front.ids["item"] = front.get(path)["data"][0]["feedback_id"]
    front.stack.until(lambda: front.stack.status(front.jobs["live"]).step, "an update on feedback")


@pytest.fixture(scope="module", params=["with a key", "open"])
def front(request: pytest.FixtureRequest, seeded: Front) -> Iterator[Front]:
    """Client of the deployment's coordinator, then of a second coordinator that asks for no keys."""
    if request.param == "with a key":
        yield seeded
        return
    port = free_ports(1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(seeded.stack.environment, "PENSTOCK_HTTP_PORT", str(port))
        patch.setitem(seeded.stack.environment, "PENSTOCK_API_KEYS", "")
        with seeded.stack.attached("penstock.services.coordinator", "coordinator-open"):
            client = Front(seeded.stack, f"http://127.0.0.1:{port}", {}, seeded.ids, seeded.jobs)
            with client.http:
                yield client
