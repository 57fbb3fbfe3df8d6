"""How long the groups of finished jobs stay: until another job needs the room. Their ledgers stay for good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord
from penstock.shared.protocol.parts import part_subject

__all__ = ["FULL_SHARE", "check_room", "oldest_finished"]

FULL_SHARE = 0.7
"""Above this share of EXPERIENCE the oldest finished job's groups are given up (its audit and replay say so)."""
DEFAULT_BUDGET = 256 << 20


def oldest_finished(records: Iterable[JobRecord], counts: Mapping[str, int]) -> str | None:
    """The finished job that was created first and still has groups; ``counts``: messages by subject of EXPERIENCE."""
    for record in sorted(records, key=lambda record: record.id):
        subject = subjects.experience(record.id)
        if record.status.phase in TERMINAL_PHASES and any(counts.get(s, 0) for s in (subject, part_subject(subject))):
            return record.id
    return None


def check_room(records: Iterable[JobRecord], byte_budget: int, *, experience_bytes: int) -> None:
    """Refuse a job whose byte budget does not fit beside those of the jobs that run.

    Raises:
        ConfigError: names the numbers.
    """
    running = [record for record in records if record.status.phase not in TERMINAL_PHASES]
    taken = sum(int(record.spec.get("limits", {}).get("byte_budget", DEFAULT_BUDGET)) for record in running)
    if taken + byte_budget > experience_bytes:
        raise ConfigError(
            f"limits.byte_budget: {byte_budget} bytes beside the {taken} of {len(running)} running jobs exceed the "
            f"EXPERIENCE stream ({experience_bytes}); lower it, wait, or raise PENSTOCK_EXPERIENCE_BYTES"
        )
