"""Feedback on live interactions, as requests of both clients: verdicts, preferences, corrections, whole interactions.

Each posted item has an id (``id``, or a generated one), so that repetitions have no second effect. All items accept
``revision`` (a higher one replaces the earlier content of the id), ``tags``, ``user`` (author of the verdict, stored as
a pseudonym) and ``observed_at``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
import uuid6

from penstock.client.calls import Call
from penstock.client.results import Accepted, FeedbackStatus, ItemReply, Retracted
from penstock.client.results.reading import many, one
from penstock.client.sending import Steps
from penstock.shared.errors import ConfigError

__all__ = [
    "Answer",
    "Items",
    "Message",
    "Tags",
    "Value",
    "batch",
    "correct",
    "post_interaction",
    "prefer",
    "retract",
    "send",
    "status",
]

Message = Mapping[str, Any]
"""A chat message in the format of OpenAI's API."""
Answer = str | Message
"""Answer of an assistant: a text, or a message."""
Value = bool | float | str | Message | Sequence[Message]
Tags = Mapping[str, str]
Items = Iterable[Mapping[str, Any]]
"""Items in the format of `POST /v1/feedback`."""

MAX_ITEMS, MAX_BYTES = 256, 7 << 20


def send(
    metric: str,
    value: Value,
    *,
    inference: str | None = None,
    episode: str | None = None,
    turn: int | None = None,
    weight: float | None = None,
    final: bool | None = None,
    comment: str | None = None,
    dryrun: bool | None = None,
    id: str | None = None,
    revision: int | None = None,
    tags: Tags | None = None,
    user: str | None = None,
    observed_at: datetime | None = None,
) -> Call[Accepted]:
    """Post one verdict and return once it is on disk; repeated posts with the same ``id`` have one effect.

    Args:
        metric: name of a metric that the job declares, or `reward`, `comment` or `demonstration`.
        turn: index of the interaction in the episode; default: the last one.
        weight: 0 to 1, relative to other verdicts on the same answer.
        final: True: no more feedback follows, and the episode ends.
        dryrun: only validate it.

    Raises:
        ConfigError: neither or both of ``inference`` and ``episode``, or the job does not accept such a verdict.
    """
    if (inference is None) == (episode is None):
        raise ConfigError("feedback is about an inference or about an episode: give one of them")
    body = {
        "metric_name": metric, "value": value, "inference_id": inference, "episode_id": episode, "turn": turn,
        "weight": weight, "final": final, "comment": comment, "dryrun": dryrun,
    }  # fmt: skip
    return _post(body, id=id, revision=revision, tags=tags, user=user, observed_at=observed_at)


def prefer(
    chosen: Answer,
    rejected: Answer,
    *,
    strength: float | None = None,
    model: str | None = None,
    messages: Sequence[Message] | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    id: str | None = None,
    revision: int | None = None,
    tags: Tags | None = None,
    user: str | None = None,
    observed_at: datetime | None = None,
) -> Call[Accepted]:
    """Post a preference of one answer over another.

    Args:
        chosen: id of a response of this deployment; with ``model`` a text, or a message of the assistant.
        rejected: the other answer, in the same form.
        strength: above 0, at most 1: the factor of the pair in the loss.
        model: name or id of the job that learns from two answers to ``messages`` or ``prompt_token_ids``.
    """
    body = {
        "kind": "preference", "chosen": chosen, "rejected": rejected, "strength": strength, "model": model,
        "messages": messages, "prompt_token_ids": prompt_token_ids,
    }  # fmt: skip
    return _post(body, id=id, revision=revision, tags=tags, user=user, observed_at=observed_at)


def correct(
    inference: str,
    corrected: Answer,
    *,
    id: str | None = None,
    revision: int | None = None,
    tags: Tags | None = None,
    user: str | None = None,
    observed_at: datetime | None = None,
) -> Call[Accepted]:
    """Post the correct answer to an interaction: a text, or a message of the assistant."""
    body = {"kind": "correction", "inference_id": inference, "corrected": _message(corrected)}
    return _post(body, id=id, revision=revision, tags=tags, user=user, observed_at=observed_at)


def post_interaction(
    model: str,
    *,
    messages: Sequence[Message] | None = None,
    completion: Answer | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    token_ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    policy_version: int | None = None,
    sampling: Mapping[str, float] | None = None,
    tokenizer_sha: str | None = None,
    reward: float | None = None,
    rewards: Mapping[str, float] | None = None,
    group_id: str | None = None,
    episode: str | None = None,
    turn: int | None = None,
    done: bool | None = None,
    id: str | None = None,
    revision: int | None = None,
    tags: Tags | None = None,
    user: str | None = None,
    observed_at: datetime | None = None,
) -> Call[Accepted]:
    """Post a whole interaction of an agent that another system serves, with the answer as ``completion`` or token ids.

    Args:
        model: name or id of the online job.
        logprobs: log-probs (natural logarithm) of the sampler, one for each of ``token_ids``.
        policy_version: the policy version that generated the answer.
        sampling: `temperature`, `top_p` and `top_k` of the sampler; default: 1, 1, 0.
        tokenizer_sha: digest of tokenizer and chat template, as `template` in any recorded interaction of this model.
        rewards: values by metric name; ``reward`` is the value of the metric `reward`.
        group_id: answers of one group are compared with each other.
        episode: UUID of the episode of which the interaction is a turn; ``turn`` is its index there, from 0.
        done: True for the last turn of an episode; default: False, or True without ``episode``.
    """
    body = {
        "kind": "interaction", "model": model, "messages": messages, "completion": _message(completion),
        "prompt_token_ids": prompt_token_ids, "token_ids": token_ids, "logprobs": logprobs,
        "policy_version": policy_version, "sampling": sampling, "tokenizer_sha": tokenizer_sha, "reward": reward,
        "rewards": rewards, "group_id": group_id, "episode_id": episode, "turn": turn, "done": done,
    }  # fmt: skip
    return _post(body, id=id, revision=revision, tags=tags, user=user, observed_at=observed_at)


def batch(items: Items) -> Steps[list[ItemReply]]:
    """Post items of any kind, in the format of the request body; return one row per item, in order.

    An item without a `feedback_id` gets one, so that it can be sent again. Sends as many requests as needed, each with
    up to 256 items.
    """
    found: list[ItemReply] = []
    for some in _parts(items):
        found += yield Call("POST", "/v1/feedback/batch", many(ItemReply), body=b"[" + b",".join(some) + b"]")
    return found


def status(id: str) -> Call[FeedbackStatus]:
    """Show the status of an item. Raises NotFound."""
    return Call("GET", f"/v1/feedback/{id}", one(FeedbackStatus))


def retract(id: str) -> Call[Retracted]:
    """Retract an item; needs the scope ``feedback:admin``. Raises NotFound."""
    return Call("POST", f"/v1/feedback/{id}/retract", one(Retracted))


def _post(body: Mapping[str, Any], *, id: str | None, **about: Any) -> Call[Accepted]:
    said = {key: value for key, value in {**body, **about}.items() if value is not None}
    return Call("POST", "/v1/feedback", one(Accepted), body=_bytes({"feedback_id": id or _new_id(), **said}))


def _parts(items: Items) -> Iterator[list[bytes]]:
    """Split the items into as few requests as the server's limits allow."""
    some: list[bytes] = []
    for item in items:
        data = _bytes({"feedback_id": _new_id(), **item})
        if some and (len(some) == MAX_ITEMS or sum(map(len, some)) + len(data) > MAX_BYTES):
            yield some
            some = []
        some.append(data)
    if some:
        yield some


def _bytes(item: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(item, default=_builtin)
    except TypeError as error:
        raise ConfigError(f"the feedback has no JSON form: {error}") from None


def _builtin(value: Any) -> Any:
    """Convert any mapping to a dict, and any sequence to a list. Raises TypeError for other values."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _message(answer: Answer | None) -> Message | None:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def _new_id() -> str:
    return str(uuid6.uuid7())
