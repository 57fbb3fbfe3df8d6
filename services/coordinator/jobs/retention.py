"""Decides which jobs lose groups, batches, metrics, events and interactions when streams fill. No job loses its
ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.parts import part_subject

__all__ = ["FULL_SHARE", "GIVEN_UP", "check_room", "oldest_finished", "without_interactions"]

FULL_SHARE = 0.7
"""Fill level of a stream above which the messages of the oldest finished job are purged from it; audit and replay of
that job report the loss."""
GIVEN_UP: Mapping[str, Callable[[str], str]] = {
    subjects.EXPERIENCE: subjects.experience,
    subjects.BATCHES: subjects.batches,
    subjects.METRICS: subjects.metrics,
    subjects.EVENTS: subjects.events,
    subjects.INTERACTIONS: subjects.interactions,
    subjects.FEEDBACK: subjects.feedback,
    subjects.DECISIONS: subjects.decisions,
}
"""Streams from which finished jobs can be purged, each with the function that returns a job's subject there."""


def oldest_finished(
    jobs: Iterable[JobEntry], counts: Mapping[str, int], stream: str = subjects.EXPERIENCE
) -> str | None:
    """Of the finished jobs that still have messages in ``stream``, return the id of the one that was created first, or
    None. ``counts`` has the number of messages by subject."""
    for job in sorted(jobs, key=lambda job: job.id):
        subject = GIVEN_UP[stream](job.id)
        if job.finished and any(counts.get(s, 0) for s in (subject, part_subject(subject))):
            return job.id
    return None


def without_interactions(jobs: Iterable[JobEntry]) -> list[str]:
    """Return the jobs whose interactions may be purged, in the order of purging.

    Finished jobs come first, then running ones that do not learn from interactions. Online jobs purge decided
    interactions themselves.
    """
    jobs = sorted(jobs, key=lambda job: job.id)
    finished = [job.id for job in jobs if job.finished]
    others = [job.id for job in jobs if job.kind != "online_rl"]
    return list(dict.fromkeys([*finished, *others]))


def check_room(jobs: Iterable[JobEntry], byte_budget: int, *, experience_bytes: int) -> None:
    """Refuse a job if the stream EXPERIENCE has no room for the byte budgets of the job and of all running jobs
    together.

    Raises:
        ConfigError: the budget does not fit; the message has the numbers.
    """
    running = [job for job in jobs if not job.finished]
    taken = sum(job.byte_budget for job in running)
    if taken + byte_budget > experience_bytes:
        raise ConfigError(
            f"limits.byte_budget: {byte_budget} bytes beside the {taken} of {len(running)} running jobs exceed the "
            f"EXPERIENCE stream ({experience_bytes}); lower it, wait, or raise PENSTOCK_EXPERIENCE_BYTES"
        )
