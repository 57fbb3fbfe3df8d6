"""Parts of the coordinator of these tests that keep their books in memory, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from penstock.shared.config.rewards.graders import AnyGrader, StringCheckGrader, parts_of
from penstock.shared.config.rewards.slots import fill_slots
from penstock.shared.errors import ConfigError, NotFound, Unavailable
from penstock.shared.protocol.audit_log import AuditRecord
from penstock.shared.protocol.grading import GradeReply, error_text
from penstock.shared.protocol.scaling import Pool, ScaleReply
from penstock.shared.protocol.webhooks import DeliveryState, StoredWebhook
from penstock.shared.transport.address import check_url

__all__ = ["AuditLogInMemory", "GradersInMemory", "ScalingInMemory", "WebhooksInMemory", "sample_row"]


def sample_row(id: str, env: str, number: int) -> dict[str, Any]:
    """A completion, as ``services.coordinator.samples`` shows it."""
    return {
        "id": id, "step": 4, "draw": f"{number}.0", "index": 0, "env": env, "prompt": f"{number}+1=",
        "completion": str(number + 1), "answer": str(number + 1), "reward": 1.0, "parts": {"exact": 1.0},
        "advantage": 0.0, "greedy": False, "failed": False, "finish": "stop", "tokens": 2, "logprob": -1.5,
        "min_version": 3, "max_version": 4, "worker": "rollout-0",
    }  # fmt: skip


class AuditLogInMemory:
    """``AuditLog`` in a list; while ``down`` nothing can be stored."""

    def __init__(self) -> None:
        self.stored: list[AuditRecord] = []
        self.down = False

    async def append(self, record: AuditRecord) -> None:
        if self.down:
            raise Unavailable("the bus does not answer")
        self.stored.append(record)

    async def page(
        self, *, key: str, job: str, since: float | None, after: int, limit: int
    ) -> list[tuple[int, AuditRecord]]:
        found = [
            (seq, one)
            for seq, one in enumerate(self.stored, 1)
            if key in ("", one.key) and job in ("", one.job) and one.time >= (since or 0) and seq > after
        ]
        return found[:limit]


class WebhooksInMemory:
    """``Webhooks`` that delivers nothing; addresses at `refused.example` are refused."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredWebhook] = {}
        self._by_key: dict[str, str] = {}

    async def create(
        self, url: str, types: list[str], *, job: str | None, description: str, key: str = ""
    ) -> StoredWebhook:
        self._check(url)
        if key in self._by_key:
            return self.stored[self._by_key[key]]
        id = f"wh_{len(self.stored):032x}"
        self.stored[id] = StoredWebhook(
            id=id, url=url, types=types, job=job, description=description, created_at=datetime.now(UTC),
            secret="whsec_c2VjcmV0",
        )  # fmt: skip
        if key:
            self._by_key[key] = id
        return self.stored[id]

    async def find(self, id: str) -> StoredWebhook:
        if id not in self.stored:
            raise NotFound(f"no webhook '{id}'")
        return self.stored[id]

    async def list_all(self) -> list[StoredWebhook]:
        return list(self.stored.values())

    async def change(self, id: str, changes: dict[str, Any]) -> StoredWebhook:
        if "url" in changes:
            self._check(changes["url"])
        self.stored[id] = (await self.find(id)).model_copy(update=changes)
        return self.stored[id]

    async def delete(self, id: str) -> None:
        await self.find(id)
        del self.stored[id]

    async def state(self, id: str) -> DeliveryState:
        await self.find(id)
        return DeliveryState(sequence=7, delivered=2)

    async def test(self, id: str) -> str:
        return "it did not answer" if "away" in (await self.find(id)).url else ""

    @staticmethod
    def _check(url: str) -> None:
        if "refused.example" in url:
            raise ConfigError("a private address")
        check_url(url, private=False)


class GradersInMemory:
    """``Graders`` for string checks; any other kind cannot be opened."""

    async def grade(self, grader: AnyGrader, sample: str | None, item: dict[str, Any]) -> GradeReply:
        scores: list[float] = []
        for part in parts_of(grader).values():
            if not isinstance(part, StringCheckGrader):
                return GradeReply(error=error_text("python_grader_runtime_error", "not Python"), seconds=0.5)
            if sample is None:
                continue
            try:
                text, wanted = (
                    fill_slots(slots, item, {"output_text": sample}) for slots in (part.input, part.reference)
                )
            except LookupError as error:
                return GradeReply(error=error_text("invalid_variable_error", str(error.args[0])))
            scores.append(float(text == wanted))
        return GradeReply(scores=scores, seconds=0.25)


class ScalingInMemory:
    """``Scaling``, until nobody supervises any more."""

    def __init__(self) -> None:
        self.supervised = True

    async def pool(self, pool: Pool) -> ScaleReply:
        if not self.supervised:
            raise Unavailable("nobody serves it")
        return ScaleReply(replicas=1, ready=1, leaving=0)
