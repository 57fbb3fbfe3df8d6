"""Users of NATS, with the subjects that each role may publish and subscribe to. Only this module maps roles to
subjects.

A deployment has one user per role, each with its own password. Responses to requests go to an inbox below
``_INBOX.ROLE``, which only that role can subscribe to. The permissions do not restrict the server itself: it sends the
response to a request of its API to any subject that the request names. Only the coordinator and the trainer may request
``DIRECT.GET``, because its response, a stored message, is the only one whose bytes a requester can choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from penstock.shared.protocol import subjects

__all__ = ["OPERATOR", "ROLES", "SUPERVISOR", "Permissions", "inbox_of", "nats_users", "permissions"]

SUPERVISOR = "supervisor"
"""Role of the process that starts and scales the services of a host."""
OPERATOR = "operator"
"""Role of users and their tools: backups, benchmarks, the ``nats`` command. May do everything."""
ROLES = ("coordinator", "rollout", "env", "reward", "trainer", SUPERVISOR, OPERATOR)

_API = "$JS.API"


@dataclass(frozen=True)
class Permissions:
    """Subjects (with wildcards) that a role may publish and subscribe to; the NATS server refuses all other
    subjects."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_of(role: str) -> str:
    """Return the prefix of a role's inboxes; for '', the prefix of inboxes of clients without a user."""
    return f"_INBOX.{role}" if role else "_INBOX"


def permissions(role: str) -> Permissions:
    """Return the permissions of a role. Raises KeyError if ``role`` is not in ROLES."""
    publish, subscribe = _TABLE[role]
    if role == OPERATOR:
        return Permissions(publish, subscribe)
    inbox = f"{inbox_of(role)}.>"
    beats = () if role == SUPERVISOR else (_all(partial(subjects.heartbeat, role)),)
    asks = (f"{_API}.STREAM.NAMES", f"{_API}.STREAM.INFO.{subjects.TICKETS}")  # info of streams, and bus time
    return Permissions((inbox, *_answers(OPERATOR), *asks, *beats, *publish), (inbox, *subscribe))


def nats_users(passwords: Mapping[str, str]) -> str:
    """Return the ``authorization`` block of a NATS configuration, with a user for each role in ``passwords``.

    A password that begins with ``$`` is the name of a variable of the server's environment.
    """
    lines = ["authorization {", "  users: ["]
    for role, password in passwords.items():
        allowed = permissions(role)
        shown = password if password.startswith("$") else json.dumps(password)
        lines += [
            "    {",
            f"      user: {json.dumps(role)}, password: {shown}",
            "      permissions: {",
            f"        publish: {{ allow: {json.dumps(allowed.publish)} }}",
            f"        subscribe: {{ allow: {json.dumps(allowed.subscribe)} }}",
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _all(subject_of: Callable[[str], str]) -> str:
    """Return a wildcard that matches ``subject_of(name)`` for every name."""
    return subject_of("x").rpartition(".")[0] + ".*"


def _stream(stream: str) -> str:
    """Return a wildcard for all subjects of a stream."""
    return f"{stream.lower()}.>"


def _key(bucket: str, keys: str = ">") -> str:
    """Return a wildcard for keys of a bucket."""
    return f"$KV.{bucket}.{keys}"


def _reads(stream: str, subject: str, *, direct: bool = False) -> tuple[str, ...]:
    """Return the JetStream API subjects that a role needs to read the messages of ``subject``, either through consumers
    that the role creates or one message at a time. ``direct`` adds the call ``DIRECT.GET``."""
    return (
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.STREAM.MSG.GET.{stream}",
        f"{_API}.CONSUMER.CREATE.{stream}.*.{subject}",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{_API}.CONSUMER.DELETE.{stream}.*",
        *([f"{_API}.DIRECT.GET.{stream}"] if direct else []),
    )


def _bucket(name: str) -> tuple[str, ...]:
    """Return the JetStream API subjects that a role needs to read a bucket."""
    return _reads(f"KV_{name}", _key(name))


def _works(queue: str) -> tuple[str, ...]:
    """Return the JetStream API subjects that a role needs to take and acknowledge messages of a work queue, on servers
    with or without a JetStream domain."""
    return (
        f"{_API}.CONSUMER.CREATE.{queue}.*.{_stream(queue)}",
        f"{_API}.CONSUMER.MSG.NEXT.{queue}.*",
        f"$JS.ACK.{queue}.>",
        f"$JS.ACK.*.*.{queue}.>",
    )


def _answers(*roles: str) -> tuple[str, ...]:
    """Return the inbox subjects on which a role replies to requests from ``roles``."""
    return tuple(f"{inbox_of(role)}.>" for role in roles)


_LIVE = (_all(subjects.inference_worker), _all(subjects.inference_present))
_STREAMS = (
    subjects.TICKETS, subjects.RAW, subjects.EXPERIENCE, subjects.BATCHES, subjects.LEDGER, subjects.SNAPSHOTS,
    subjects.EVENTS, subjects.METRICS, subjects.INTERACTIONS, subjects.FEEDBACK, subjects.DECISIONS, subjects.DEAD,
    subjects.AUDIT, subjects.VIDEOS, subjects.PARTIAL,
)  # fmt: skip
_TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "coordinator": (
        (
            f"{_API}.>", "$JS.ACK.>", "$KV.>", *map(_stream, _STREAMS),
            _all(subjects.command), subjects.LEADER, subjects.REPLAY, subjects.SCALE, subjects.GRADE,
            subjects.ENV_DESCRIBE, subjects.ENV_TRY, subjects.ROLLOUT_TRY,
            _all(subjects.inference), _all(subjects.reading), *_LIVE,
            _all(subjects.inference_chunks), _all(subjects.inference_claims), *_answers("rollout", "trainer"),
        ),
        (
            subjects.HEARTBEATS, "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
            _all(subjects.report), _all(subjects.evaluation), subjects.LEADER, subjects.HOLD,
            _all(subjects.replay_progress), _all(subjects.inference_chunks), _all(subjects.inference_claims), *_LIVE,
        ),
    ),
    "rollout": (
        (
            *_works(subjects.TICKETS), *_bucket(subjects.JOBS), *_bucket(subjects.MANIFESTS),
            _stream(subjects.RAW), _stream(subjects.EXPERIENCE), _stream(subjects.INTERACTIONS),
            _stream(subjects.VIDEOS), _stream(subjects.PARTIAL), f"{_API}.STREAM.MSG.GET.{subjects.PARTIAL}",
            _all(subjects.report), _all(subjects.evaluation), _all(subjects.score), _all(subjects.lost_weights),
            subjects.ENV_OPEN, _all(subjects.env), _all(subjects.tools),
            _all(subjects.inference_chunks), *_answers("coordinator"),
        ),
        (_all(subjects.inference), _all(subjects.reading), *_LIVE, subjects.ROLLOUT_TRY),
    ),
    "env": (
        (*_bucket(subjects.JOBS), *_answers("rollout", "coordinator")),
        (subjects.ENV_OPEN, subjects.ENV_DESCRIBE, subjects.ENV_TRY, _all(subjects.env), _all(subjects.tools)),
    ),
    "reward": (
        (
            *_works(subjects.RAW), f"{_API}.STREAM.MSG.GET.{subjects.RAW}", f"{_API}.STREAM.MSG.DELETE.{subjects.RAW}",
            _stream(subjects.EXPERIENCE), *_bucket(subjects.JOBS), *_answers("rollout", "coordinator"),
        ),
        (_all(subjects.score), subjects.GRADE),
    ),
    "trainer": (
        (
            *_bucket(subjects.JOBS), *_bucket(subjects.MANIFESTS), *_bucket(subjects.LEASES),
            *_reads(subjects.BATCHES, _stream(subjects.BATCHES)),
            *_reads(subjects.EXPERIENCE, _stream(subjects.EXPERIENCE), direct=True),
            *_reads(subjects.LEDGER, _stream(subjects.LEDGER)), *_reads(subjects.METRICS, _stream(subjects.METRICS)),
            _key(subjects.MANIFESTS), _key(subjects.LEASES, "trainer.*"),
            _all(subjects.report), _all(subjects.replay_progress), *_answers("coordinator", "rollout"),
        ),
        (_all(subjects.command), _all(subjects.lost_weights), subjects.REPLAY),
    ),
    SUPERVISOR: (_answers("coordinator"), (subjects.SCALE,)),
    OPERATOR: ((">",), (">",)),
}  # fmt: skip


if __name__ == "__main__":
    print(nats_users({role: f"$PENSTOCK_NATS_{role.upper()}" for role in ROLES}), end="")  # noqa: T201
