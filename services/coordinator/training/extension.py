"""Extension of finished jobs: checks if a job can continue, and reports what changes. Pure, except for disk reads."""

from __future__ import annotations

from pathlib import Path

from penstock.services.coordinator.training.checkpoints import read_stored
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyTraining, parse_training, trains
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import checkpoint_path
from penstock.shared.errors import Conflict
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["check_extension", "extension_notes"]


def check_extension(record: JobRecord, state: LedgerState, max_updates: int, data_dir: Path) -> None:
    """Check that a finished job can continue until ``max_updates``. Reads the disk.

    Raises:
        Conflict: the job cannot continue; the message says why, and what to do instead.
    """
    what = f"job '{record.id}'"
    anew = f"submit another one that begins with model.path: job:{record.name}@latest"
    if not trains(record.spec):
        raise Conflict(f"{what} is of kind '{record.kind}': it trains nothing that could go on")
    config = parse_training(record.spec)
    if isinstance(config, OnlineJob):
        raise Conflict(f"{what} is an online job, whose conversations ended with it: {anew}")
    if record.status.phase == "failed":
        raise Conflict(f"{what} failed ({record.status.message}): {anew}")
    if max_updates <= state.updates:
        raise Conflict(f"{what} has done {state.updates} updates: max_updates must be more")
    if reason := _ended_early(record, config, state):
        raise Conflict(f"{what} would end at once: {reason}; {anew}")
    newest = state.checkpoint
    if newest is None or newest.number != state.newest_batch:
        raise Conflict(f"{what} ended without a last checkpoint: {anew}")
    if read_stored(checkpoint_path(data_dir, newest.path)) is None:
        raise Conflict(f"the files of the last checkpoint of {what} are not on the coordinator's host any more")


def _ended_early(record: JobRecord, config: AnyTraining, state: LedgerState) -> str:
    """Return why the job would end again at once; '' if the number of updates or a user ended it."""
    limit_s, begun = config.limits.timeout_s, record.created_at.timestamp()
    if limit_s is not None and bus_time() - begun > limit_s:
        return f"limits.timeout_s ({limit_s:g}) is over"
    most = config.train.max_updates
    if state.finished == "cancelled" or (most is not None and state.updates >= most):
        return ""
    return record.status.message or "its data were at their end (train.data_epochs)"


def extension_notes(config: AnyTraining, state: LedgerState, max_updates: int) -> list[str]:
    """Return messages for the user about settings whose effect changes with the larger ``max_updates``.

    Args:
        config: the job file before the extension.
        state: the ledger state at the job's end.
    """
    notes = []
    sections = {"optimizer": config.optimizer} if isinstance(config, JobConfig) else {}
    if isinstance(config, JobConfig) and config.algorithm.critic is not None:
        sections["algorithm.critic.optimizer"] = config.algorithm.critic.optimizer
    for key, section in sections.items():
        if section.schedule != "constant":
            notes.append(
                f"{key}.schedule: '{section.schedule}' had decayed over the run; it is now one over {max_updates} "
                f"updates, {state.updates / max_updates:.0%} of the way along, so that the learning rate rises again: "
                "amend optimizer.learning_rate to lower it"
            )
    if config.early_stop is not None:
        notes.append(f"early_stop: '{config.early_stop.metric}' is followed on, and may end the job before")
    return notes
