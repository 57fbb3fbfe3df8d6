"""Locust: eight users that ask, read streams and post feedback. Run as ``locust.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import gevent
from locust import FastHttpUser, constant, task
from locust.env import Environment
from locust.exception import StopUser

URL, KEY, MODEL = sys.argv[1:4]
USERS, ROUNDS = 8, 10
DEADLINE_S = 100


class Agent(FastHttpUser):
    """User that asks for whole and streamed answers in turn, and posts feedback on both."""

    host = URL
    wait_time = constant(0)
    default_headers = {"authorization": f"Bearer {KEY}"}  # noqa: RUF012
    rounds = 0

    @task
    def ask(self) -> None:
        """Ask one question and post feedback on the answer."""
        streams = self.rounds % 2 == 1
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": streams}
        reply = self.client.post("/v1/chat/completions", json=body, name="stream" if streams else "chat")
        assert not streams or reply.text.endswith("data: [DONE]\n\n")
        verdict = {"inference_id": reply.headers["x-interaction-id"], "metric_name": "accepted", "value": streams}
        self.client.post("/v1/feedback", json=verdict)
        self.rounds += 1
        if self.rounds == ROUNDS:
            raise StopUser


def main() -> None:
    """Run the client and print the number of answers."""
    environment = Environment(user_classes=[Agent], catch_exceptions=False)
    runner = environment.create_local_runner()
    runner.start(USERS, spawn_rate=USERS)
    stats = runner.stats
    with gevent.Timeout(DEADLINE_S):
        while stats.total.num_requests < 2 * USERS * ROUNDS:
            gevent.sleep(0.05)
    runner.quit()
    assert stats.total.num_failures == 0, stats.serialize_errors()
    answers = stats.get("chat", "POST").num_requests + stats.get("stream", "POST").num_requests
    assert answers == stats.get("/v1/feedback", "POST").num_requests == USERS * ROUNDS
    print(json.dumps({"version": version("locust"), "answers": answers}))


main()
