"""Gateway to the rollout workers as the HTTP API uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from penstock.shared.protocol.jobs import ModelOrigin
from penstock.shared.protocol.live.episode import EpisodeRecord
from penstock.shared.protocol.live.inference import Chunk, InferenceRequest
from penstock.shared.protocol.live.interaction import Interaction

__all__ = ["MAX_IN_FLIGHT", "Answer", "Ask", "Deployments", "EpisodeBook", "Servable", "Served", "Serving"]

MAX_IN_FLIGHT = 2048
"""Requests of one model in this process; more are told to come back, and those of one key when it has as many as there
is room left: one key alone gets half of it, two a third each."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running job under the name of its model. ``version``: its newest policy; ``created``: Unix seconds.

    ``temperature`` is what a request gets that names none, and with ``forced_sampling`` every one; ``generation``: of
    the job file that says so.
    """

    name: str
    job: str
    online: bool
    version: int
    created: int
    hold_s: float
    temperature: float = 1.0
    generation: int = 1
    forced_sampling: bool = False
    canary: tuple[int, float] | None = None
    """A version on trial, and the share of the conversations that it answers."""
    consent: Literal["opt_out", "opt_in"] = "opt_out"
    """Whose conversations are trained on."""
    strict_recording: bool = False
    """True if an answer that is not recorded is none."""
    found_episodes_s: float = 0.0
    """So long after an answer a chat that goes on from it is a turn of its episode where nobody names one; 0: then what
    nobody named is credited answer by answer, whatever episode it is shown in."""
    promoted_at: int | None = None
    """Since when the version is served (Unix seconds), of a job with a promotion gate."""
    trains: bool = True
    """False: a deployment, whose policy never changes."""
    origin: ModelOrigin | None = None
    """Checkpoint that a deployment serves."""

    def at(self, version: int, canary: tuple[int, float] | None, promoted_at: int | None) -> Served:
        """The same at another version."""
        return replace(self, version=version, canary=canary, promoted_at=promoted_at)


@dataclass(frozen=True, slots=True)
class Servable:
    """A model that is served once somebody asks for it: the final checkpoint of a job. ``ended``: Unix seconds."""

    id: str
    name: str
    job: str
    ended: int
    version: int


class Deployments(Protocol):
    """Checkpoints of jobs as models. Every method may raise Unavailable."""

    async def find(self, reference: str) -> ModelOrigin:
        """The checkpoint `job:NAME@WHICH`. Raises NotFound, or ConfigError where it cannot be read as one."""
        ...

    async def deploy(self, origin: ModelOrigin) -> str:
        """Have it served, if it is not; the id of the deployment.

        Raises:
            ConfigError: it cannot be served here.
            HttpProblem: 404 only people deploy here, 503 as many are served on request as may be.
        """
        ...

    async def servable(self, models: frozenset[str] | None) -> list[Servable]:
        """Models that ``deploy`` takes, oldest first; ``models``: only jobs of these names or ids."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request. ``draft`` lacks what the gateway decides: ids, gateway, episode, user.

    ``retries`` is how often the client sent it before, None where it does not say; a client that says so asks again
    by itself when it gets no answer. ``episode`` is empty where the client names none.
    """

    served: Served
    draft: InferenceRequest
    num_prompts: int
    user: str
    episode: str
    retries: int | None
    any_owner: bool = False
    """True if ``episode`` may be one that another key opened."""
    only_opened: bool = False
    """True if ``episode`` must be one that was opened and is remembered: the key is for it alone."""


class Answer(Protocol):
    """Answers of the rollout workers, as they come."""

    served: Served
    request: InferenceRequest
    version: int
    prompt_ids: list[list[int]]

    @property
    def id(self) -> str:
        """Of the response, and of its first interaction."""
        ...

    @property
    def num_generated(self) -> int:
        """Output tokens of all choices so far."""
        ...

    async def read(self, cursor: int) -> Sequence[Chunk]:
        """Chunks from number ``cursor`` on, as soon as there are any; none once all were read.

        Raises:
            PenstockError: the answer broke off.
        """
        ...


class EpisodeBook(Protocol):
    """Episodes that were opened by request. Every method may raise Unavailable."""

    async def create(self, served: Served, key_id: str, ttl_s: float, about: dict[str, object]) -> EpisodeRecord:
        """Open one; ``about``: split, group_id, user (a pseudonym) and tags."""
        ...

    async def get(self, served: Served, id: str) -> EpisodeRecord:
        """Raises NotFound."""
        ...

    async def list_all(self, served: Served) -> list[EpisodeRecord]:
        """All of a model, oldest first."""
        ...

    def remembered_until(self, record: EpisodeRecord) -> float:
        """Unix seconds; later nothing is known of an episode."""
        ...

    async def end(self, served: Served, id: str) -> EpisodeRecord:
        """No more requests are taken; the same twice changes nothing. Raises NotFound."""
        ...


A = TypeVar("A", bound=Answer)


class Serving(Protocol[A]):
    """The gateway. ``A``: its own kind of answers."""

    @property
    def episodes(self) -> EpisodeBook:
        """The episodes."""
        ...

    def pseudonym(self, user: str) -> str:
        """Pseudonym of a user in records; '' for no user. Raises Unavailable while it is not known yet."""
        ...

    def models(self) -> list[Served]:
        """All models. Raises Unavailable while the jobs are not read yet."""
        ...

    def find(self, model: str) -> Served:
        """A model by name or id of its job. Raises NotFound, Unavailable."""
        ...

    async def open(self, ask: Ask) -> A:
        """Have a rollout worker take the request; for a retry the answer that its client left unread. Then ``leave``.

        Raises:
            ConfigError: the prompt cannot be rendered, or is too long.
            HttpProblem: 429 where all workers are full, 503 where none answers, 410 where the episode is over.
        """
        ...

    async def interaction(self, job: str, id: str) -> Interaction | None:
        """The record of an interaction; None where there is none. Raises Unavailable."""
        ...

    async def remember(self, answer: A, message: dict[str, object]) -> None:
        """The message that a client got: a chat that goes on from it belongs to the same episode."""
        ...

    def leave(self, answer: A, *, begun: bool) -> None:
        """The reader is done or went away; ``begun``: it has seen a part of the answer."""
        ...
