"""Agents that ask an online job, judge its answers, and users who want to be deleted; what was acknowledged is kept."""

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
    """Threads that talk to one job over HTTP until they are stopped. A request that fails is counted, not repeated.

    Attributes:
        acked: user by id of every item of feedback that was answered with 202.
        deleted: users whose deletion was accepted, and when.
        replies: how requests were answered, by verb and status; 0: not at all.
        refused: the newest reply with a status of 4xx, by verb.
    """

    def __init__(self, url: str, api_key: str, job: str, seed: int, *, deletions: bool = True) -> None:
        self.acked: dict[str, str] = {}
        self.deleted: dict[str, float] = {}
        self.replies: Counter[tuple[str, int]] = Counter()
        self.refused: dict[str, str] = {}
        self._url, self._headers = url, {"authorization": f"Bearer {api_key}"}
        self._job, self._seed = job, seed
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._agent, args=(number,), daemon=True) for number in range(AGENTS)]
        if deletions:
            self._threads.append(threading.Thread(target=self._deleter, daemon=True))

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, once the requests that are out are answered or given up."""
        self._over.set()
        for thread in self._threads:
            thread.join(3 * REPLY_S)
            assert not thread.is_alive(), "a client hangs: a request has a deadline"

    def _call(self, http: httpx.Client, name: str, method: str, path: str, **body: Any) -> dict[str, Any] | None:
        """The reply; None where there was no good one."""
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
            while not self._over.wait(ASK_EVERY_S):
                user = f"user-{rng.randrange(USERS)}"
                prompt = f"{rng.randrange(10)}+{rng.randrange(10)}="
                answer = self._call(
                    http, "ask", "POST", "/v1/completions", model=self._job, prompt=prompt, user=user, max_tokens=6
                )
                if answer is not None and rng.random() < 0.9:
                    self._judge(http, answer, user, rng)

    def _judge(self, http: httpx.Client, answer: dict[str, Any], user: str, rng: random.Random) -> None:
        """Say once or twice what is thought of an answer, again with the same id, as a client that retries."""
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
            while not self._over.wait(DELETE_EVERY_S):
                user = f"user-{rng.randrange(USERS)}"
                if self._call(http, "delete", "DELETE", f"/v1/users/{user}/data") is not None:
                    self.deleted[user] = time.time()
