"""Groups larger than a message: a worker writes them in parts, one header admits them, and they are trained whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.events import BatchSealed
from penstock.shared.protocol.parts import count_of, part_subject
from penstock.shared.transport.bus import Bus, Message

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]

GROUP, TOKENS = 1024, 640
SYMBOLS = "🐀🐁🐂🐃🐄🐅🐆🐇🐈🐉+="
"""Characters of four bytes each, so that fewer tokens make a large group."""


def test_a_group_above_eight_mebibytes_is_trained(stack: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"🐁+{symbol}=", "answer": symbol}) + "\n" for symbol in SYMBOLS[:4]))
    job = stack.submit(
        f"algorithm.group_size={GROUP}", f"train.batch_size={GROUP}", "train.max_updates=1", "train.max_lag=0",
        "train.draw_timeout_s=180", f"sampling={{max_new_tokens: {TOKENS}, ignore_eos: true}}",
        f"placement.max_running={GROUP}", f"limits.byte_budget={68 << 20}",
        f"data.train={{type: file, path: {rows}}}",
        model={
            "config": {
                "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
                "max_position_embeddings": TOKENS + 8,
            },
            "tokenizer": "char",
            "characters": SYMBOLS,
        },
        reward={"scorers": [{"type": "format", "pattern": "[🐀🐁🐂🐃🐄].*"}]},
    )  # fmt: skip
    assert stack.finish(job, 180).status.step == 1
    audit = stack.check_audit(job)
    assert {check["name"]: check["detail"] for check in audit["checks"]}["digests"].startswith("1 groups read")

    async def read(bus: Bus) -> tuple[list[Message], list[Message]]:
        subject = subjects.experience(job)
        return (
            await bus.read(subjects.EXPERIENCE, subject, headers_only=True),
            await bus.read(subjects.EXPERIENCE, part_subject(subject), headers_only=True),
        )

    heads, parts = stack.on_bus(read)
    sealed = [event.groups[0] for event in stack.ledger(job) if isinstance(event, BatchSealed)]
    assert [head.seq for head in heads] == [group.seq for group in sealed]
    assert {part.seq for part in parts} == {h.seq + i for h in heads for i in range(1, count_of(h.headers))}
    assert min(count_of(head.headers) for head in heads) * MAX_INLINE_BYTES > 8 << 20
    assert all(group.num_trajectories == GROUP for group in stack.groups(job).values())
    trained = stack.client.metrics(job, names="tokens/scored")["series"]["tokens/scored"]
    assert trained == [GROUP * TOKENS]
