"""Converts a posted body to a stored item: canonical ids, pseudonyms for users, values checked against the job."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import msgspec

from penstock.services.coordinator.feedback.jobs import LiveJob
from penstock.services.coordinator.feedback.posts import (
    MAX_COMMENT,
    Correction,
    Metric,
    PostedInteraction,
    PostedPreference,
    Preference,
    is_number,
)
from penstock.shared.config.online.section import REWARD, MetricConfig
from penstock.shared.data.redaction import Redactor
from penstock.shared.errors import Flaw, Forbidden, Invalid
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.live.interaction import USER_TAG, Feedback

__all__ = ["Identity", "derived_id", "item_of", "retraction_of", "target_of", "verdict_of"]

VERSION_BITS, VERSION_8 = (0xF << 76) | (0x3 << 62), (0x8 << 76) | (0x2 << 62)
"""Bits of version and variant of a UUID, and their values in a UUID of version 8 (RFC 9562 §5.8)."""
TEXTS = ("comment", "corrected", "demonstration", "messages", "completion", "answers")
"""Fields of a body with texts that people or models wrote."""
UUID_CHARS = 36
RANGE_FACTOR = 10.0
"""A value is refused as an error of its sender if value times weight exceeds the larger `clip` bound by this factor."""
Posted = Metric | PostedInteraction | Preference | PostedPreference | Correction

_canonical = msgspec.msgpack.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Identity:
    """Sender and id of an item. ``chosen`` is True if the sender chose the id, or the Idempotency-Key that the id is
    derived from, and so can post the same id again."""

    id: str
    key_id: str
    chosen: bool
    max_weight: float = 1.0
    """Largest weight of the sender's feedback."""


def derived_id(digest: Callable[[str], bytes], key_id: str, idempotency_key: str, index: int) -> str:
    """Return the id of an item posted with an Idempotency-Key: a repeated request always gives the same id.

    ``digest`` is keyed by a secret (``Pseudonyms.digest``), so no other sender can compute the id and use it first.
    """
    value = int.from_bytes(digest(f"item\n{key_id}\n{idempotency_key}\n{index}")[:16], "big")
    return str(UUID(int=(value & ~VERSION_BITS) | VERSION_8))


def target_of(post: Posted) -> tuple[str, str]:
    """Return ``(id, JSON pointer)`` of the target that determines a post's job; ('', '') if the post names its job."""
    if isinstance(post, PostedInteraction | PostedPreference):
        return "", ""
    if isinstance(post, Preference):
        return _bare(post.chosen), "/chosen"
    inference: str | None = getattr(post, "inference_id", None)
    if inference is not None:
        return _bare(inference), "/inference_id"
    return _bare(str(getattr(post, "episode_id", ""))), "/episode_id"


def item_of(post: Posted, job: LiveJob, who: Identity, pseudonym: Callable[[str], str]) -> Feedback:
    """Convert a validated post to the item of feedback that is stored.

    Call it in a thread if the job redacts texts, because that may take a while.

    Raises:
        Invalid: the job does not declare the metric, or the value is invalid; in a job that redacts texts, also tokens,
            and names with parts to redact.
        Forbidden: feedback without a weight from a key with a weight limit.
    """
    _refuse_weightless(post, who)
    tags = dict(post.tags)
    fields = _fields(post, job)
    if job.redactor is not None:
        _refuse_tokens(post)
        _refuse_names(post, job.redactor)
        tags = job.redactor.replace_all(tags)
        fields |= _redacted(fields, job.redactor)
    if USER_TAG in tags:
        tags[USER_TAG] = pseudonym(post.tags[USER_TAG])  # of the original name, before redaction
    if post.observed_at is not None:
        fields["body"] = {**fields.get("body", {}), "observed_at": post.observed_at.timestamp()}
    item = Feedback(
        id=who.id, job=job.id, key_id=who.key_id, received=bus_time(), user=pseudonym(post.named_user),
        revision=post.revision, tags=tags, **fields,
    )  # fmt: skip
    if item.weight > who.max_weight:
        item = msgspec.structs.replace(item, weight=who.max_weight)
    return msgspec.structs.replace(item, fingerprint=_fingerprint(item))


def retraction_of(feedback: str, job: str, who: Identity) -> Feedback:
    """Build the feedback item that retracts the item whose id is ``feedback``."""
    item = Feedback(
        id=who.id, job=job, kind="retraction", key_id=who.key_id, received=bus_time(), body={"feedback": feedback}
    )  # fmt: skip
    return msgspec.structs.replace(item, fingerprint=_fingerprint(item))


def verdict_of(kind: Literal["release", "drop"], feedback: str, job: str, who: Identity) -> Feedback:
    """Build the feedback item that releases or drops the quarantined item whose id is ``feedback``."""
    item = Feedback(
        id=who.id, job=job, kind=kind, key_id=who.key_id, received=bus_time(), body={"feedback": feedback}
    )  # fmt: skip
    return msgspec.structs.replace(item, fingerprint=_fingerprint(item))


def _fields(post: Posted, job: LiveJob) -> dict[str, Any]:
    """Return the fields of an item that depend on its kind."""
    match post:
        case PostedInteraction():
            _check_rewards(post, job)
            episode = _bare(post.episode_id) if post.episode_id is not None else ""
            shared = {"kind", "feedback_id", "revision", "tags", "observed_at", "user", "episode_id", "turn"}
            body = post.model_dump(exclude=shared, exclude_none=True)
            final = post.done if post.done is not None else not episode
            return {"kind": "interaction", "episode": episode, "turn": post.turn, "final": final, "body": body}
        case Preference():
            body = {"chosen": _bare(post.chosen), "rejected": _bare(post.rejected), "strength": post.strength}
            if body["chosen"] == body["rejected"]:
                raise _invalid("/rejected", "a response cannot be preferred to itself")
            return {"kind": "preference", "inference": body["chosen"], "body": body}
        case PostedPreference():
            answers = [_message(post.chosen), _message(post.rejected)]
            if answers[0] == answers[1]:
                raise _invalid("/rejected", "an answer cannot be preferred to itself")
            body = post.model_dump(include={"model", "messages", "prompt_token_ids", "strength"}, exclude_none=True)
            return {"kind": "preference", "body": {**body, "answers": answers}}
        case Correction():
            body = {"corrected": post.corrected}
            return {"kind": "correction", "inference": _bare(post.inference_id), "body": body}
        case _:
            return _metric_fields(post, job)


def _message(answer: str | dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def _metric_fields(post: Metric, job: LiveJob) -> dict[str, Any]:
    inference: str | None = getattr(post, "inference_id", None)
    value, body = _value(post, job, by_episode=inference is None)
    if post.comment is not None:
        body["comment"] = post.comment
    target, _ = target_of(post)
    return {
        "kind": "metric", "metric": post.metric_name, "value": value, "weight": post.weight, "final": post.final,
        "turn": post.turn, "body": body, "inference" if inference is not None else "episode": target,
    }  # fmt: skip


def _value(post: Metric, job: LiveJob, *, by_episode: bool) -> tuple[bool | float | str | None, dict[str, Any]]:
    """Return ``(value, body)`` of the feedback item for a posted metric. ``value`` is a boolean, a number or a text. A
    demonstration posted as chat messages therefore goes into ``body``, and ``value`` is None."""
    name, value = post.metric_name, post.value
    declared = job.metric(name)
    if declared is not None:
        if declared.level == "episode" and not by_episode:
            raise _invalid("/episode_id", f"'{name}' judges an episode: post it with episode_id, not inference_id")
        return _checked(name, value, declared, "/value"), {}
    if name == "comment":
        if not isinstance(value, str) or len(value) > MAX_COMMENT:
            raise _invalid("/value", f"a comment is a string of at most {MAX_COMMENT} characters")
        return value, {}
    if name == "demonstration":
        if by_episode:
            raise _invalid("/inference_id", "a demonstration is of one response: post it with inference_id")
        if isinstance(value, bool | int | float):
            raise _invalid("/value", "a demonstration is a string or a message")
        return (value, {}) if isinstance(value, str) else (None, {"demonstration": value})
    raise _invalid("/metric_name", f"job '{job.name}' declares no metric '{name}'; it takes: {', '.join(job.names)}")


def _checked(name: str, value: Any, declared: MetricConfig, pointer: str) -> bool | float:
    """Return a value that fits its metric's declaration. Raises Invalid."""
    if declared.type == "boolean":
        if not isinstance(value, bool):
            raise _invalid(pointer, f"'{name}' is a boolean, found {_kind(value)}")
        return value
    if not is_number(value):
        raise _invalid(pointer, f"'{name}' is a finite number, found {_kind(value)}")
    bound = RANGE_FACTOR * max(abs(declared.clip[0]), abs(declared.clip[1]))
    if abs(value * declared.weight) > bound:
        raise _invalid(pointer, f"'{name}' times its weight {declared.weight:g} must lie within ±{bound:g}")
    return float(value)


def _redacted(fields: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Return the fields among ``fields`` that contain texts of people or models, with the texts redacted."""
    body = fields.get("body", {})
    texts = {name: redactor.replace_all(body[name]) for name in TEXTS if name in body}
    found: dict[str, Any] = {"body": {**body, **texts}} if texts else {}
    return found | ({"value": redactor.replace(fields["value"])} if isinstance(fields.get("value"), str) else {})


def _refuse_tokens(post: Posted) -> None:
    for name in ("token_ids", "prompt_token_ids"):
        if isinstance(post, PostedInteraction | PostedPreference) and getattr(post, name, None) is not None:
            detail = "this job blanks what must not be stored, and tokens cannot be read here: post the text"
            raise _invalid(f"/{name}", detail)


def _refuse_names(post: Posted, redactor: Redactor) -> None:
    """Refuse a tag name or a group id that contains text to redact, because redaction could make two different names
    equal."""
    names = {f"/tags/{place}": name for place, name in enumerate(post.tags)}
    if isinstance(post, PostedInteraction) and post.group_id is not None:
        names["/group_id"] = post.group_id
    for pointer, name in names.items():
        if found := redactor.find(name):
            what = "a group_id" if pointer == "/group_id" else "the name of a tag"
            raise _invalid(pointer, f"{what} holds what this job blanks ({found[0].name}): send another name")


def _refuse_weightless(post: Posted, who: Identity) -> None:
    """Refuse feedback that has no weight, if the key has a weight limit. Only values of metrics have weights: all other
    feedback, such as a demonstration, trains with full weight."""
    if who.max_weight >= 1:
        return
    if isinstance(post, Metric):
        if post.metric_name != "demonstration":
            return
        kind, pointer = "a demonstration", "/metric_name"
    else:
        kind, pointer = f"kind '{post.kind}'", "/kind"
    detail = (
        f"this API key counts at most {who.max_weight:g} (its max_weight), and {kind} has no weight: "
        "post values of metrics, or use a key without max_weight"
    )
    raise Forbidden("limited_weight", detail, [Flaw(pointer=pointer, detail=detail)])


def _check_rewards(post: PostedInteraction, job: LiveJob) -> None:
    values = dict(post.rewards) | ({REWARD: post.reward} if post.reward is not None else {})
    for name, value in values.items():
        pointer = "/reward" if name == REWARD and post.reward is not None else f"/rewards/{name}"
        declared = job.metric(name)
        if declared is None:
            raise _invalid(pointer, f"job '{job.name}' declares no metric '{name}'; it takes: {', '.join(job.names)}")
        _checked(name, value, declared, pointer)


def _fingerprint(item: Feedback) -> str:
    """Return the SHA-256 of an item's content, without sender, id and revision."""
    said = (
        item.job, item.kind, item.user, item.inference, item.episode, item.metric, item.value, item.weight,
        item.final, item.turn, item.tags, item.body,
    )  # fmt: skip
    return hashlib.sha256(_canonical.encode(said)).hexdigest()


def _bare(text: str) -> str:
    """Return the UUID in a posted id, in lower case and without the optional prefix. The module ``posts`` has already
    checked the format."""
    return text[-UUID_CHARS:].lower()


def _kind(value: Any) -> str:
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def _invalid(pointer: str, detail: str) -> Invalid:
    return Invalid("invalid_feedback", detail, [Flaw(pointer=pointer, detail=detail)])
