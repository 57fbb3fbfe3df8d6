"""Turns posted out of order on a real bus, under two leaders, become one audited trajectory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.queries.admission_audit import audit_admissions
from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import decode_events
from penstock.shared.transport.bus import Bus

spec = importlib.util.spec_from_file_location(
    "off_policy_supply", Path(__file__).with_name("test_off_policy_supply.py")
)
assert spec is not None
assert spec.loader is not None
supply: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supply)
EPISODE, REFUSED = "0192f0c1-0000-7000-8000-00000000000e", "0192f0c1-0000-7000-8000-00000000000f"
TURNS: list[dict[str, Any]] = [
    {"prompt_token_ids": [10, 11], "token_ids": [20, 21]},
    {"prompt_token_ids": [7, 8], "token_ids": [9], "reward": 0.25},
    {"prompt_token_ids": [10, 11, 20, 21, 30], "token_ids": [22], "reward": 1.0},
]


async def test_turns_out_of_order_form_one_trajectory_under_two_leaders(bus: Bus, tmp_path: Path) -> None:
    record = await JobStore(bus).create(supply.CONFIG)
    job = record.id

    async def post(place: int, *, done: bool) -> None:
        await supply.post_feedback(
            bus, job, f"t{place}", "interaction", key="trusted", episode=EPISODE, turn=place, final=done,
            body=TURNS[place] | {"policy_version": 0},
        )  # fmt: skip

    async def turn_of_another(name: str, turn: int, *, done: bool) -> None:
        body = {"prompt_token_ids": [5], "token_ids": [6]}
        await supply.post_feedback(
            bus, job, name, "interaction", key="trusted", episode=REFUSED, turn=turn, final=done, body=body
        )

    async with supply.leader(bus, record, 1, tmp_path):
        await supply.report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        await turn_of_another("r0", 0, done=True)
        await supply.until_statuses(bus, job, r0="rejected")
        await post(2, done=True)
        await post(1, done=False)
        await supply.until_statuses(bus, job, t1="matched", t2="matched")
    async with supply.leader(bus, record, 2, tmp_path), supply.reader(bus, job, version=0) as engine:
        await post(0, done=False)
        manifest = await supply.until_manifest(bus, job, 1)
        await supply.until_statuses(bus, job, t0="admitted", t1="admitted", t2="admitted")
        main, other = sorted(await supply.every_group_of(bus, manifest), key=lambda group: -len(group.token_ids))
        assert (main.prompt_ids.tolist(), main.token_ids.tolist()) == ([10, 11], [20, 21, 30, 22])
        assert (main.mask.tolist(), main.rewards.tolist()) == ([1, 1, 0, 1], [1.0])
        assert (other.token_ids.tolist(), other.rewards.tolist()) == ([9], [0.25])
        exact = await engine.score([10, 11, 20, 21, 30, 22])
        scored = [exact.logprobs[place] for place in (1, 2, 4)]
        assert [abs(a - b) < 1e-5 for a, b in zip(main.logprobs[main.mask != 0], scored, strict=True)] == [True] * 3
        assert [group.weight for group in manifest.groups] == [0.5, 0.5]
        late = {"prompt_token_ids": [5], "token_ids": [6], "reward": 1.0}
        await supply.post_feedback(
            bus, job, "late", "interaction", key="trusted", episode=EPISODE, turn=3, final=True, body=late
        )
        statuses = await supply.until_statuses(bus, job, late="rejected")
        assert statuses["late"].reason == "episode_over"
    async with supply.leader(bus, record, 3, tmp_path):  # which starts reading after the refused turns
        await turn_of_another("r1", 1, done=True)
        statuses = await supply.until_statuses(bus, job, r1="rejected")
        assert statuses["r1"].reason == "episode_over"
    entries = [decode_events(m.data) for m in await bus.read(subjects.LEDGER, subjects.ledger(job))]
    assert not audit_ledger(entries, supply.CONFIG).violations
    assert await audit_admissions(bus, job, supply.CONFIG, entries) == (2, [])
