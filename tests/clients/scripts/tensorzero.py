"""TensorZero's client, which posts feedback and knows only UUIDs. Run as ``tensorzero.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from importlib.metadata import version
from typing import Any

from tensorzero import AsyncTensorZeroGateway, TensorZeroError, TensorZeroGateway

URL, KEY, MODEL = sys.argv[1:4]


def http(path: str, body: Any = None) -> tuple[Any, Any]:
    """Send ``body`` by POST, or a GET without one; return the decoded reply and its headers."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers), timeout=60) as reply:
        return json.load(reply), reply.headers


def answer() -> tuple[str, str]:
    """Ask a question; return the ids of the answer and of its episode, without prefixes."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    _, headers = http("/v1/chat/completions", body)
    return headers["x-interaction-id"], headers["x-episode-id"].removeprefix("ep_")


def verdicts(gateway: TensorZeroGateway) -> list[str]:
    """Post every kind of value that the client has; return the ids of the feedback that the job trains on."""
    liked, _ = answer()
    rated, episode = answer()
    posted = [
        gateway.feedback(metric_name="accepted", inference_id=liked, value=True, tags={"user_id": "u1", "page": "7"}),
        gateway.feedback(metric_name="accepted", inference_id=rated, value=False),
    ]
    for more in (
        gateway.feedback(metric_name="score", inference_id=rated, value=0.5),
        gateway.feedback(metric_name="comment", inference_id=liked, value="too long"),
        gateway.feedback(metric_name="demonstration", inference_id=rated, value="hello"),
        gateway.feedback(metric_name="solved", episode_id=episode, value=True),
        gateway.feedback(metric_name="accepted", inference_id=liked, value=True, dryrun=True),
    ):
        assert more.feedback_id
    return [str(one.feedback_id) for one in posted]


def refusals(gateway: TensorZeroGateway) -> None:
    """Check that the gateway refuses wrong metrics and values, and that the client raises its error."""
    target, _ = answer()
    for bad in ({"metric_name": "liked", "value": True}, {"metric_name": "accepted", "value": "yes"}):
        try:
            gateway.feedback(inference_id=target, **bad)
        except TensorZeroError as error:
            assert error.status_code == 422, error
        else:
            raise AssertionError(f"{bad} was not refused")


async def at_once() -> int:
    """Post sixteen items of feedback on one answer asynchronously; return the number of answers."""
    target, _ = answer()
    built = AsyncTensorZeroGateway.build_http(gateway_url=URL, timeout=60)
    async with await built as gateway:
        posts = [gateway.feedback(metric_name="score", inference_id=target, value=i / 16) for i in range(16)]
        assert len({str(reply.feedback_id) for reply in await asyncio.gather(*posts)}) == 16
    return 1


def main() -> None:
    """Run the client; print the number of answers and the ids of the feedback."""
    os.environ["TENSORZERO_API_KEY"] = KEY
    with TensorZeroGateway.build_http(gateway_url=URL, timeout=60) as gateway:
        feedback = verdicts(gateway)
        refusals(gateway)
    answers = 2 + 1 + asyncio.run(at_once())
    print(json.dumps({"version": version("tensorzero"), "answers": answers, "feedback": feedback}), flush=True)
    os._exit(0)  # its threads now and then crash an interpreter that ends in good order


main()
