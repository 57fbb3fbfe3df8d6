"""Routes of episodes: open, list, show and end episodes, list their interactions, and create keys for them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.live.completion_metadata import MAX_USER
from penstock.services.coordinator.api.live.inference import InteractionRow, served_of, serving_of
from penstock.services.coordinator.api.own_models import check_job
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.posts import Tags
from penstock.services.coordinator.problems import HttpProblem
from penstock.services.coordinator.serving.episodes import Episodes
from penstock.services.coordinator.serving.models import Served
from penstock.shared.errors import NotFound
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.live.episode import EpisodeRecord
from penstock.shared.protocol.live.episode_keys import EPISODE_SCOPES, EpisodeGrant, EpisodeScope, episode_key
from penstock.shared.protocol.live.interaction import USER_TAG, bare_id, job_mark, marked_id, named_tags

__all__ = ["router"]

router = APIRouter(prefix="/v1/episodes", tags=["inference"])
Opener = Annotated[Caller, require("episodes:write", reach="checked")]
HOUR_S, DAY_S = 3600.0, 86400.0
SECRET = {"Cache-Control": "no-store"}
"""Headers of a reply that contains a key: no cache may store such a reply."""

OpenedEpisode = Annotated[str, Path(max_length=64, description="Id of an episode that was opened here: ep_ and a UUID")]


class KeyBody(BaseModel):
    """Scopes and lifetime of a key that is valid for one episode."""

    model_config = ConfigDict(extra="forbid")

    expires_in_s: float = Field(HOUR_S, gt=0, le=30 * DAY_S)
    scopes: list[EpisodeScope] = Field(list(EPISODE_SCOPES), min_length=1, max_length=2)


KEY_BODY = body_schema(KeyBody, required=False)


class EpisodeBody(BaseModel):
    """Request to open an episode."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=256)
    ttl_s: float = Field(DAY_S, gt=0, le=30 * DAY_S, description="Seconds for which requests are accepted")
    split: Literal["train", "val"] = Field("train", description="`val`: recorded, never trained on")
    group_id: str | None = Field(None, min_length=1, max_length=128)
    user: str | None = Field(
        None, max_length=MAX_USER, description="User of requests that name none. Also: tags.user_id"
    )
    tags: Tags = Field(default_factory=dict)
    key: KeyBody | None = Field(None, description="Also create a key for it, as `/keys` does: `api_key` of the reply")


class Episode(EpisodeRecord):
    """An episode and the ``base_url`` that a client of OpenAI's API uses for it."""

    base_url: str


class NewEpisode(Episode):
    """A new episode, with its key if requested; ``api_key`` is not shown again."""

    api_key: str | None = None
    api_key_expires_at: datetime | None = None


class EpisodeKey(BaseModel):
    """A key of one episode, for use at ``base_url``; ``key`` is not shown again."""

    object: Literal["rl.episode_key"] = "rl.episode_key"
    key: str
    episode: str
    base_url: str
    scopes: list[EpisodeScope]
    expires_at: datetime


class InteractionList(BaseModel):
    """A page of interactions, in the order of their recording."""

    object: Literal["list"] = "list"
    data: list[InteractionRow]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class EpisodeList(BaseModel):
    """A page of episodes, oldest first."""

    object: Literal["list"] = "list"
    data: list[Episode]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


@router.post(
    "", status_code=201, response_model=NewEpisode, openapi_extra=body_schema(EpisodeBody),
    responses={507: {"description": "The key has opened more episodes than others leave it room for."}},
)  # fmt: skip
async def create(request: Request, caller: Opener, backend: BackendDep) -> Response:
    """Open an episode: requests to its `base_url` are its turns.

    With `key`, the reply has an `api_key` that is valid for this episode only; such a reply is not stored, so that
    a repetition with the same `Idempotency-Key` opens another episode.
    """
    body = await read_model(request, EpisodeBody)
    served = served_of(backend, body.model, caller)
    if body.key is not None:
        _check_giveable(caller, body.key)
    record = await _episodes(backend).create(served, caller.id, body.ttl_s, _about(body, serving_of(backend).pseudonym))
    shown, place = _shown(record, request), {"Location": f"/v1/episodes/{record.id}"}
    if body.key is None:
        return Json(shown, 201, place)
    text, expires_at = await _signed(backend, caller, record, body.key)
    new = NewEpisode(**shown.model_dump(), api_key=text, api_key_expires_at=expires_at)
    return Json(new, 201, {**place, **SECRET})


@router.get("", response_model=EpisodeList)
async def list_episodes(
    *,
    request: Request,
    caller: Opener,
    backend: BackendDep,
    model: Annotated[str, Query(min_length=1, max_length=256)],
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List a model's episodes that the key opened, oldest first; a key with the scope `admin` lists the episodes of all
    keys."""
    found = await _episodes(backend).list_all(served_of(backend, model, caller))
    found = [record for record in found if _is_own(caller, record.key_id) and (after is None or record.id > after)]
    page = [_shown(record, request) for record in found[:limit]]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Json(EpisodeList(data=page, has_more=len(found) > limit, first_id=first, last_id=last))


@router.get("/{episode}", response_model=Episode)
async def get_episode(episode: OpenedEpisode, request: Request, caller: Opener, backend: BackendDep) -> Response:
    """Show an episode."""
    return Json(_shown((await _own(backend, episode, caller))[1], request))


@router.post("/{episode}/end", response_model=Episode)
async def end_episode(episode: OpenedEpisode, request: Request, caller: Opener, backend: BackendDep) -> Response:
    """End an episode: it accepts no more requests, and the coordinator assigns credit to its turns. Safe to repeat."""
    served, record = await _own(backend, episode, caller)
    return Json(_shown(await _episodes(backend).end(served, record.id), request))


@router.get("/{episode}/interactions", response_model=InteractionList)
async def list_interactions(
    *,
    episode: OpenedEpisode,
    caller: Annotated[Caller, require("jobs:read", reach="checked")],
    backend: BackendDep,
    after: Annotated[str | None, Query(max_length=64, description="last_id of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List the recorded interactions of an episode in order. Works also for an episode that was never opened, and after
    its job has ended.

    A key sees interactions of its own requests and of keys and episodes that it created; the scope `admin` sees all.
    """
    if bare_id(episode) is None:
        raise NotFound(f"'{episode}' is not the id of an episode")
    if backend.feedback is None:
        raise HttpProblem(503, "no_index", "this process keeps no index of interactions", headers={"Retry-After": "1"})
    found = await backend.feedback.turns(episode, after=after, limit=limit + 1)
    for job in {row["job"] for row in found}:
        await check_job(backend, caller, job, f"no episode '{episode}'")
    if any(not _is_own(caller, row["key_id"]) for row in found):
        raise NotFound(f"no episode '{episode}'")
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return Json({"object": "list", "data": page, "has_more": len(found) > limit, "first_id": first, "last_id": last})


@router.post("/{episode}/keys", status_code=201, response_model=EpisodeKey, openapi_extra=KEY_BODY)
async def make_key(
    episode: OpenedEpisode,
    request: Request,
    caller: Opener,
    backend: BackendDep,
) -> Response:
    """Create a key that is valid for this episode only, for a browser or an agent that should hold no other key.

    The key may send requests in the episode and post feedback on it and its turns, until it or the key that created it
    expires. It is not stored.
    """
    body = await read_model(request, KeyBody)
    _, record = await _own(backend, episode, caller)
    _check_giveable(caller, body)
    if "inference:write" in body.scopes and record.over:
        raise HttpProblem(410, "episode_over", f"episode '{record.id}' is over: open another one")
    text, expires_at = await _signed(backend, caller, record, body)
    key = EpisodeKey(
        key=text, episode=record.id, base_url=_shown(record, request).base_url, scopes=sorted(set(body.scopes)),
        expires_at=expires_at,
    )  # fmt: skip
    return Json(key, 201, SECRET)


def _check_giveable(caller: Caller, wanted: KeyBody) -> None:
    """Raise HttpProblem (403) if the caller lacks a scope that the new key should have."""
    missing = [scope for scope in wanted.scopes if not caller.may(scope)]
    if missing:
        raise HttpProblem(403, "missing_scope", f"this key lacks {', '.join(missing)} and cannot give them to another")


async def _signed(backend: Backend, caller: Caller, record: EpisodeRecord, wanted: KeyBody) -> tuple[str, datetime]:
    """Create the text of a key for an episode; return the text and the time at which the key expires."""
    expires = int(min(bus_time() + wanted.expires_in_s, _episodes(backend).remembered_until(record)))
    grant = EpisodeGrant(episode=record.id, maker=caller.id, scopes=sorted(set(wanted.scopes)), expires=expires)
    return episode_key(grant, await backend.keys.secret()), datetime.fromtimestamp(expires, UTC)


def _about(body: EpisodeBody, pseudonym: Callable[[str], str]) -> dict[str, object]:
    """Return the fields of ``body`` that the episode's record stores. Names of users are replaced by pseudonyms."""
    user = pseudonym(body.user or body.tags.get(USER_TAG, ""))
    tags = named_tags(body.tags, pseudonym)
    return {"split": body.split, "group_id": body.group_id, "user": user, "tags": tags}


def _episodes(backend: Backend) -> Episodes:
    return serving_of(backend).episodes


def _is_own(caller: Caller, key_id: str) -> bool:
    """Return True if the caller may read and end the episodes that the key ``key_id`` opened."""
    return caller.id == key_id or caller.may("admin")


async def _own(backend: Backend, episode: str, caller: Caller) -> tuple[Served, EpisodeRecord]:
    """Return ``(model, record)`` of an episode; the episode's id encodes the job of the model.

    Raises:
        NotFound: the episode does not exist, or another key opened it.
    """
    missing, marked = NotFound(f"no running job has an episode '{episode}'"), marked_id(episode)
    for served in serving_of(backend).models() if marked is not None else ():
        if marked is not None and job_mark(served.job) == marked[1] and caller.may_use(served.name, served.job):
            try:
                record = await _episodes(backend).get(served, episode)
            except NotFound:
                break
            if _is_own(caller, record.key_id):
                return served, record
    raise missing


def _shown(record: EpisodeRecord, request: Request) -> Episode:
    base: Any = request.base_url
    return Episode(**record.model_dump(), base_url=f"{str(base).rstrip('/')}/e/{record.id}/v1")
