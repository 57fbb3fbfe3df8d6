"""Fine-tuning by a user of OpenAI's SDK. ``test_fine_tuning.py`` runs this program with the SDK's own interpreter."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai

DELIVERED: list[tuple[dict[str, str], bytes]] = []


class Receiver(BaseHTTPRequestHandler):
    """Server that accepts webhooks."""

    def do_POST(self) -> None:
        """Store the delivery in ``DELIVERED``."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        DELIVERED.append((dict(self.headers.items()), body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def listen() -> str:
    """Start a server that accepts webhooks; return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def main(url: str, key: str, folder: Path) -> None:
    """Fine-tune a model and check every reply. Raises AssertionError or an error of the SDK if a check fails."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    grader = json.loads((folder / "grader.json").read_text())
    with (folder / "rows.jsonl").open("rb") as rows:
        file = client.files.create(file=rows, purpose="fine-tune")
    assert (file.object, file.status, file.purpose) == ("file", "processed", "fine-tune")
    assert file.id in [one.id for one in client.files.list(limit=1)]
    assert client.files.content(file.id).read().count(b"\n") == 16

    jobs = client.fine_tuning.jobs
    row = {"good": "01234", "mark": "+"}
    run = client.fine_tuning.alpha.graders.run(grader=grader, model_sample="9+", item=row)
    assert (run.reward, run.sub_rewards, run.metadata.errors.other_error) == (1.0, {"low": 0.0, "plus": 1.0}, False)
    assert client.fine_tuning.alpha.graders.validate(grader=grader).grader is not None

    method = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": {"batch_size": 4}}}
    try:
        jobs.create(model="gpt-nothing", training_file=file.id, method=method)
    except openai.UnprocessableEntityError as error:
        assert error.param == "/model", error
    else:
        raise AssertionError("a model that is not there was taken")

    hook: Any = client.post("/webhooks", cast_to=object, body={"url": listen()})
    job = jobs.create(model="tiny", training_file=file.id, method=method, metadata={"from": "sdk"}, suffix="sdk")
    assert (job.object, job.model, job.method.type) == ("fine_tuning.job", "tiny", "reinforcement")
    assert jobs.pause(job.id).id == jobs.resume(job.id).id == job.id
    deadline = time.monotonic() + 90
    while (job := jobs.retrieve(job.id)).status != "succeeded":
        assert job.status in ("queued", "running", "paused"), job
        assert time.monotonic() < deadline, job
        time.sleep(0.2)
    check_webhook(client, hook, job.id, deadline)
    assert job.fine_tuned_model == f"job:{job.id}@final"
    assert [one.id for one in jobs.list(limit=1, metadata={"from": "sdk"})] == [job.id]
    events = list(jobs.list_events(job.id, limit=2))  # page by page
    assert len(events) == len({event.id for event in events}) > 2
    assert events[0].message.startswith("succeeded"), events[0]
    checkpoints = list(jobs.checkpoints.list(job.id))
    assert (checkpoints[0].step_number, checkpoints[-1].step_number) == (4, 0)
    try:
        jobs.cancel(job.id)
    except openai.ConflictError:
        pass
    else:
        raise AssertionError("a job that has ended was cancelled")
    assert client.files.delete(file.id).deleted


def check_webhook(client: openai.OpenAI, hook: Any, job: str, deadline: float) -> None:
    """Check that a webhook reported the end of the job, and that the SDK's own verifier accepts its signature."""
    while not DELIVERED:
        assert time.monotonic() < deadline, "no webhook came"
        time.sleep(0.05)
    headers, body = DELIVERED[0]
    client.webhooks.verify_signature(body, headers, secret=hook["secret"])
    try:
        client.webhooks.verify_signature(body + b" ", headers, secret=hook["secret"])
    except openai.InvalidWebhookSignatureError:
        pass
    else:
        raise AssertionError("a signature of another body was taken")
    event = json.loads(body)
    assert (event["type"], event["subject"]) == ("rl.job.succeeded.v1", job), event
    client.delete(f"/webhooks/{hook['id']}", cast_to=object)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
