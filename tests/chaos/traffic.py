"""Agents that ask an online job and post feedback, and users who delete their data; acknowledged feedback is noted."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from typing import Any

import httpx

__all__ = ["Traffic"]

USERS, AGENTS = 24, 3
ASK_EVERY_S, DELETE_EVERY_S = 0.15, 12.0
REPLY_S = 20.0


class Traffic:
    """Threads that send requests to one job over HTTP until they are stopped. Failed requests are counted, not retried.

    Attributes:
        acked: User of each item of feedback that was answered with 202, by id.
        deleted: Time of each accepted deletion, by user.
        replies: Number of replies by verb and status; status 0 stands for no reply.
        refused: Newest reply with a status of 4xx, by verb.
    """

    def __init__(self, url: str, api_key: str, job: str, seed: int, *, deletions: bool = True) -> None:
        self.acked: dict[str, str] = {}
        self.deleted: dict[str, float] = {}
        self.replies: Counter[tuple[str, int]] = Counter()
        self.refused: dict[str, str] = {}
        self._url, self._headers = url, {"authorization": f"Bearer {api_key}"}
        self._job, self._seed = job, seed
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._agent, args=(number,), daemon=True) for number in range(AGENTS)]
        if deletions:
            self._threads.append(threading.Thread(target=self._deleter, daemon=True))

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads, once requests in progress are answered or time out."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(3 * REPLY_S)
            assert not thread.is_alive(), "a client hangs: a request has a deadline"

    def _call(self, http: httpx.Client, name: str, method: str, path: str, **body: Any) -> dict[str, Any] | None:
        """Send a request; return the body of a successful reply, else None."""
        try:
            reply = http.request(method, path, **({"json": body} if body else {}))
        except httpx.TransportError:
            status, found = 0, None
        else:
            status, found = reply.status_code, dict(reply.json()) if reply.is_success else None
            if 400 <= status < 500:
                self.refused[name] = reply.text[:200]
        with self._lock:
            self.replies[name, status] += 1
        return found

    def _agent(self, number: int) -> None:
        rng = random.Random(f"agent/{self._seed}/{number}")
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=REPLY_S) as http:
            while not self._stopped.wait(ASK_EVERY_S):
                user = f"user-{rng.randrange(USERS)}"
                prompt = f"{rng.randrange(10)}+{rng.randrange(10)}="
                answer = self._call(
                    http, "ask", "POST", "/v1/completions", model=self._job, prompt=prompt, user=user, max_tokens=6
                )
                if answer is not None and rng.random() < 0.9:
                    self._judge(http, answer, user, rng)

    def _judge(self, http: httpx.Client, answer: dict[str, Any], user: str, rng: random.Random) -> None:
        """Post feedback on an answer, sometimes twice with the same id, as a client does that retries."""
        text, id = answer["choices"][0]["text"], str(uuid.UUID(int=rng.getrandbits(128), version=4))
        for _ in range(1 + (rng.random() < 0.2)):
            accepted = self._call(
                http, "feedback", "POST", "/v1/feedback", inference_id=answer["id"], metric_name="liked",
                value=text[:1] in "01234", feedback_id=id, user=user,
            )  # fmt: skip
            if accepted is not None:
                with self._lock:
                    self.acked[accepted["feedback_id"]] = user

    def _deleter(self) -> None:
        rng = random.Random(f"deleter/{self._seed}")
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=REPLY_S) as http:
            while not self._stopped.wait(DELETE_EVERY_S):
                user = f"user-{rng.randrange(USERS)}"
                if self._call(http, "delete", "DELETE", f"/v1/users/{user}/data") is not None:
                    self.deleted[user] = time.time()
