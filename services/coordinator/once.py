"""A submission that is repeated is the same job, whichever coordinator it reaches and whoever died in between.

The id of the job is settled first, under the submission's key in the bucket `answers`; then its record is made. Whoever
repeats the submission makes the same record, or finds it. Entries of the bucket live for half an hour.
"""

from __future__ import annotations

import hashlib

from penstock.services.coordinator.api.replies import HttpProblem
from penstock.shared.errors import Conflict, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.transport.bus import Bus

__all__ = ["Once"]

PREFIX = "job"


class Once:
    """Ids of jobs by the key of their submission."""

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.ANSWERS)

    async def job_id(self, key: str, body: bytes) -> str:
        """The id for a submission with this key: a new one, or that of the same submission before.

        Raises:
            HttpProblem: 422 the key came with another body before.
            Unavailable: the bus does not answer.
        """
        name = f"{PREFIX}.{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        digest = hashlib.sha256(body).hexdigest()
        mine = new_job_id()
        try:
            await self._kv.create(name, f"{mine} {digest}".encode())
            return mine
        except Conflict:
            entry = await self._kv.get(name)
        if entry is None or not entry.value:
            raise Unavailable("an earlier submission with this Idempotency-Key was forgotten just now; send it again")
        job, _, known = entry.value.decode().partition(" ")
        if known != digest:
            detail = "this Idempotency-Key was used with another job file; use a new key"
            raise HttpProblem(422, "idempotency_key_reused", detail)
        return job
