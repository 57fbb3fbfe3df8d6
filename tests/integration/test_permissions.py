"""The users of NATS: the subjects that each service may publish and read, enforced by a real server."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.permissions import ROLES, nats_users, permissions
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer
from penstock.shared.transport.streams import STREAMS

PASSWORDS = {role: f"secret-of-{role}" for role in ROLES}
WORKERS = ("rollout", "env", "reward", "trainer")
QUICK_S = 0.6
"""Time to wait for an acknowledgement, which a refused message never gets."""
SIZES = {"experience_bytes": 8 << 20, "stream_bytes": 4 << 20}


@pytest.fixture
def locked(store_dir: Path) -> Iterator[NatsServer]:
    """A NATS server with a user for each role."""
    with NatsServer(store_dir / "nats", passwords=PASSWORDS) as server:
        yield server


@pytest.fixture
async def users(locked: NatsServer) -> AsyncIterator[dict[str, Bus]]:
    """Connections of all roles by name; all streams exist."""
    async with AsyncExitStack() as stack:
        found = {
            role: await stack.enter_async_context(await Bus.connect(locked.url_of(role), name=role)) for role in ROLES
        }
        await found["coordinator"].ensure_streams(**SIZES)
        yield found


async def stored(bus: Bus, subject: str) -> bool:
    """Return True if NATS acknowledges a message on a subject."""
    try:
        await bus.publish(subject, b"x", deadline_s=QUICK_S)
    except Unavailable:
        return False
    return True


async def test_without_a_password_nobody_connects(locked: NatsServer) -> None:
    with pytest.raises(ConfigError, match="refuses the credentials"):
        await Bus.connect(locked.url, name="stranger")
    with pytest.raises(ConfigError, match="refuses the credentials"):
        await Bus.connect(locked.url.replace("://", "://coordinator:guess@"), name="stranger")


async def test_each_role_stores_only_its_own_kinds_of_data(users: dict[str, Bus]) -> None:
    own = {
        "coordinator": {
            subjects.ledger("j"),
            subjects.tickets("j"),
            "$KV.keys.k",
            "$KV.jobs.j",
            subjects.audit("k", "j"),
        },
        "rollout": {
            subjects.raw("j"),
            subjects.experience("j"),
            subjects.interaction("j", "i"),
            subjects.partial("j", "train:0.0", 0),
        },
        "env": set(),
        "reward": {subjects.experience("j")},
        "trainer": {"$KV.manifests.j", "$KV.leases.trainer.j"},
    }
    asked = sorted(
        set[str]().union(*own.values()) | {"$KV.leases.coordinator", subjects.batches("j"), subjects.feedback("j")}
    )
    found = await asyncio.gather(*(stored(users[role], subject) for role in WORKERS for subject in asked))
    taken = {role: set[str]() for role in WORKERS}
    for (role, subject), is_stored in zip(((r, s) for r in WORKERS for s in asked), found, strict=True):
        if is_stored:
            taken[role].add(subject)
    assert taken == {role: own[role] for role in WORKERS}
    assert all(await asyncio.gather(*(stored(users["coordinator"], subject) for subject in sorted(own["coordinator"]))))


async def test_a_worker_cannot_read_keys_or_feedback(users: dict[str, Bus]) -> None:
    await users["coordinator"].publish("$KV.keys.k", b"digest")
    await users["coordinator"].publish(subjects.feedback("j"), b"private")

    async def read(role: str, stream: str, subject: str) -> bool:
        bus = users[role]
        with pytest.raises(Unavailable):
            async with asyncio.timeout(QUICK_S):
                await bus.get(stream, 1, deadline_s=QUICK_S / 2)
        with pytest.raises((Unavailable, TimeoutError)):
            async with asyncio.timeout(QUICK_S):
                await bus.read(stream, subject)
        return True

    wanted = [("KV_keys", "$KV.keys.>"), (subjects.FEEDBACK, subjects.feedback("j"))]
    assert all(await asyncio.gather(*(read(role, *one) for role in WORKERS for one in wanted)))


@pytest.mark.long
async def test_only_rollout_workers_read_completions_in_progress(users: dict[str, Bus]) -> None:
    subject = subjects.partial("j", "train:0.0", 1)
    await users["rollout"].publish(subject, b"tokens")

    async def reads(role: str) -> bool:
        try:
            async with asyncio.timeout(QUICK_S if role != "rollout" else 30):
                found = await users[role].last(subjects.PARTIAL, subject)
        except (Unavailable, TimeoutError):
            return False
        return found is not None and found.data == b"tokens"

    assert [role for role in WORKERS if await reads(role)] == ["rollout"]


async def test_answers_reach_their_own_role_alone(users: dict[str, Bus]) -> None:
    received: list[str] = []
    for role in WORKERS:
        await users[role].subscribe("_INBOX.coordinator.>", lambda subject, _: received.append(subject))
        await users[role].subscribe(subjects.command("j"), lambda subject, _: received.append(subject))
    async with await users["trainer"].serve(subjects.command("j"), answer):
        assert await users["coordinator"].request(subjects.command("j"), b"go", deadline_s=5) == b"done"
    assert received == [subjects.command("j")], "only the trainer may receive commands"


async def test_each_role_can_send_its_requests(users: dict[str, Bus]) -> None:
    asked = {
        "report": (subjects.report("j"), "coordinator", ["trainer", "rollout"]),
        "evaluation": (subjects.evaluation("j"), "coordinator", ["rollout"]),
        "command": (subjects.command("j"), "trainer", ["coordinator"]),
        "lost_weights": (subjects.lost_weights("j"), "trainer", ["rollout"]),
        "score": (subjects.score("j"), "reward", ["rollout"]),
        "simulators": (subjects.ENV_OPEN, "env", ["rollout"]),
        "describe": (subjects.ENV_DESCRIBE, "env", ["coordinator"]),
        "try tools": (subjects.ENV_TRY, "env", ["coordinator"]),
        "try code": (subjects.ROLLOUT_TRY, "rollout", ["coordinator"]),
    }
    for subject, server, clients in asked.values():
        async with await users[server].serve(subject, answer):
            for client in clients:
                assert await users[client].request(subject, b"", deadline_s=5) == b"done", f"{client}: {subject}"


async def answer(_: bytes) -> bytes:
    return b"done"


async def test_a_reply_address_cannot_make_the_server_write_to_a_stream(users: dict[str, Bus]) -> None:
    """A request names LEDGER, which the coordinator may write, as its reply address; the coordinator stores nothing."""
    async with await users["coordinator"].serve(subjects.report("j"), answer):
        rollout = users["rollout"]
        await rollout._connection.send(subjects.report("j"), b"", reply=subjects.ledger("j"))
        assert await rollout.request(subjects.report("j"), b"", deadline_s=5) == b"done"
    assert (await users["coordinator"].stream_state(subjects.LEDGER)).messages == 0


def test_only_the_operator_may_do_everything() -> None:
    assert permissions("operator").publish == (">",)
    for role in WORKERS:
        allowed = permissions(role)
        assert ">" not in (*allowed.publish, *allowed.subscribe)
        assert not any(
            subject.startswith(("ledger", "$JS.API.STREAM.CREATE", "$JS.API.>")) for subject in allowed.publish
        )
        assert all(subject.startswith(f"_INBOX.{role}.") for subject in allowed.subscribe if "_INBOX" in subject)


def test_the_users_of_the_containers_are_those_of_the_code() -> None:
    """To update the file, run: python -m penstock.shared.protocol.permissions > deploy/nats-users.conf."""
    file = Path(__file__).parents[2] / "deploy" / "nats-users.conf"
    assert file.read_text() == nats_users({role: f"$PENSTOCK_NATS_{role.upper()}" for role in ROLES})


async def test_the_bus_over_tls_with_certificates_of_both_sides(store_dir: Path, certificates: dict[str, Path]) -> None:
    files = certificates
    variables = {
        "PENSTOCK_NATS_TLS_CA": str(files["ca.pem"]),
        "PENSTOCK_NATS_TLS_CERT": str(files["client.pem"]),
        "PENSTOCK_NATS_TLS_KEY": str(files["client.key"]),
    }
    tls = (files["server.pem"], files["server.key"], files["ca.pem"])
    with NatsServer(store_dir / "nats", passwords=PASSWORDS, tls=tls) as server:
        url = server.url_of("operator")
        async with await Bus.connect(url, name="test", tls=load_settings(variables).nats_tls) as bus:
            await bus.ensure_streams(**SIZES)
            assert await bus.publish(subjects.ledger("j"), b"x") == 1
        stranger = load_settings(variables | {"PENSTOCK_NATS_TLS_CA": str(files["other.pem"])}).nats_tls
        with pytest.raises((ConfigError, Unavailable)):
            await Bus.connect(url, name="test", tls=stranger, deadline_s=1)
    with pytest.raises(ConfigError, match="belong together"):
        _ = load_settings({"PENSTOCK_NATS_TLS_CERT": "c.pem"}).nats_tls


def test_the_coordinator_may_store_in_every_stream() -> None:
    allowed = permissions("coordinator").publish
    assert {f"{stream.lower()}.>" for stream in STREAMS} <= set(allowed)


@pytest.mark.parametrize("role", ["coordinator", *WORKERS])
def test_a_role_may_use_the_subjects_that_its_code_names(role: str) -> None:
    """A subject that is missing in a user's permissions would fail only in deployments with passwords."""
    files = (Path(__file__).parents[2] / "services" / role).rglob("*.py")
    named = {name for file in files for name in re.findall(r"\bsubjects\.([A-Za-z_]+)", file.read_text())}
    allowed = permissions(role)
    missing = set()
    for name in named:
        found = getattr(subjects, name)
        if callable(found):
            found = found(*["x"] * len(inspect.signature(found).parameters))
        if name.endswith(("_manifest", "_routes")):  # a key
            found = subjects.MANIFESTS
        stream = found.partition(".")[0].upper()
        ways = [
            found,
            f"$JS.API.STREAM.MSG.GET.{found}",
            f"$JS.API.STREAM.MSG.GET.KV_{found}",
            f"$JS.API.CONSUMER.MSG.NEXT.{found}.c",
            f"$JS.API.CONSUMER.CREATE.{stream}.c.{found}",
        ]
        if not any(covers(each, way) for each in (*allowed.publish, *allowed.subscribe) for way in ways):
            missing.add(name)
    assert len(named) > 2
    assert missing == set()


def covers(pattern: str, subject: str) -> bool:
    """Return True if a pattern covers another subject, which may have wildcards, too."""
    parts, words = pattern.split("."), subject.split(".")
    if parts[-1] == ">":
        return len(words) >= len(parts) and covers(
            ".".join(parts[:-1]) or "x", ".".join(words[: len(parts) - 1]) or "x"
        )
    return len(parts) == len(words) and all(part in ("*", word) for part, word in zip(parts, words, strict=True))
