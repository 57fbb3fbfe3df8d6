"""Commands of a job's leader to its trainer, repeated until the ledger shows that they were carried out."""

from __future__ import annotations

import logging
import time
from typing import Any

from penstock.services.coordinator.outbox import Outbox
from penstock.services.coordinator.run import JobRun
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, Command, CommandKind
from penstock.shared.transport.bus import Bus

__all__ = ["TrainerCommands"]

logger = logging.getLogger(__name__)

RETRY_S = 2.0


class TrainerCommands:
    """Checkpoints and rollbacks of one job; one thing at a time is asked for."""

    def __init__(self, bus: Bus, outbox: Outbox, job: str, epoch: int) -> None:
        self._bus, self._outbox, self._job, self._epoch = bus, outbox, job, epoch
        self._asked_at = 0.0
        self._asked: tuple[object, ...] = ()

    def follow(self, run: JobRun) -> bool:
        """Ask for what ``run`` wants now; True while it wants something."""
        state, rollback = run.state, run.rollback
        if rollback is not None:
            args = {"number": rollback.number, "reason": rollback.reason, "version": state.version}
            self._ask("rollback", args, (rollback.number, state.version))
        elif unwanted := run.unwanted:
            self._ask("leave_out", {"draws": [str(draw) for draw in unwanted]}, tuple(unwanted))
        elif reason := run.wants_checkpoint:
            newest = state.checkpoint
            self._ask("checkpoint", {"reason": reason}, (None if newest is None else newest.number, state.forked))
        else:
            return False
        return True

    def _ask(self, kind: CommandKind, args: dict[str, Any], about: tuple[object, ...]) -> None:
        asked = (kind, *about)
        if asked == self._asked and time.monotonic() - self._asked_at < RETRY_S:
            return
        self._asked, self._asked_at = asked, time.monotonic()
        command = pack(Command(kind=kind, epoch=self._epoch, args=args), job=self._job, epoch=self._epoch)
        self._outbox.later(lambda: self._send(command), keep=False)

    async def _send(self, command: bytes) -> None:
        try:
            reply = await self._bus.request(subjects.command(self._job), command, deadline_s=RETRY_S)
            ack, _ = unpack(reply, Ack)
            if not ack.ok:
                logger.warning("the trainer of %s refused a command: %s", self._job, ack.reason)
        except Unavailable as error:
            logger.info("the trainer of %s did not take the command yet: %s", self._job, error)
