"""Routes of OpenAI's inference API: models, chat and text completions, also below the address of an episode."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.http.sse import CONTENT
from penstock.services.coordinator.api.live.completion_bodies import ChatBody, CompletionBody, draft_of, episode_of
from penstock.services.coordinator.api.live.completion_format import ChatFormat, TextFormat
from penstock.services.coordinator.api.live.completion_reply import CompletionReply, as_problem
from penstock.services.coordinator.api.live.direct import posts_of
from penstock.services.coordinator.api.live.own_episode import own_episode
from penstock.services.coordinator.api.live.user_limits import check_user
from penstock.services.coordinator.api.own_models import no_model
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.deployments import Servable
from penstock.services.coordinator.problems import HttpProblem
from penstock.services.coordinator.serving.answer import Ask
from penstock.services.coordinator.serving.gateway import Gateway
from penstock.services.coordinator.serving.models import Served
from penstock.shared.config.model import REFERENCE
from penstock.shared.errors import ConfigError, NotFound, PenstockError, Unavailable
from penstock.shared.protocol.jobs import ModelOrigin
from penstock.shared.protocol.live.interaction import Interaction, marked_id

__all__ = ["DIRECT", "InteractionRow", "router", "served_of", "serving_of"]

router = APIRouter(tags=["inference"])
Reader = Annotated[Caller, require("models:read", reach="checked")]
APPEAR_S, APPEAR_LOOK_S = 10.0, 0.02
"""Longest wait until this process's gateway knows a new deployment, and the poll interval, in seconds."""
DECISION_S = 2.0
"""Longest wait for the decision on an interaction, in seconds; after that the reply shows no decision."""
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": CONTENT},
    410: {"description": "The episode is over."},
}

Writer = Annotated[Caller, require("inference:write", in_episode=True, reach="checked")]
EpisodeId = Annotated[str, Path(max_length=128, pattern="^[A-Za-z0-9._:-]+$", description="Id of an episode")]


Span = Annotated[list[int], Field(min_length=3, max_length=3)]
"""``[policy version, start, stop]``: this version sampled the tokens [start, stop)."""


class Model(BaseModel):
    """A running job or deployment as a model, or a checkpoint that is deployed on its first request."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    job: str
    online: bool
    policy_version: int
    promoted_at: int | None = None
    """Time of the promotion of ``policy_version``, in Unix seconds, for a job with a promotion gate."""
    served: bool = True
    """False if a rollout worker loads the model only on its first request."""
    checkpoint: str | None = None
    """Checkpoint that a deployment serves, as `job:ID@NUMBER`."""


class ModelList(BaseModel):
    """All models."""

    object: str = "list"
    data: list[Model]


class Choice(BaseModel):
    """One choice; see OpenAI's reference for its other fields."""

    model_config = ConfigDict(extra="allow")

    index: int
    interaction_id: str | None = Field(description="Target for feedback on it; null if nothing is recorded")
    finish_reason: str | None


class Completion(BaseModel):
    """A completion; see OpenAI's reference. ``model`` names the policy version: `name@version`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]


class Trained(BaseModel):
    """The update (``step``) that trained on an interaction, and the policy version that it produced."""

    step: int
    version: int


class InteractionDecision(BaseModel):
    """Decision on an interaction: `admitted`, `trained`, or `rejected` for ``reason``.

    ``ordinal`` is the interaction's position in the job's data order, once it is admitted.
    """

    status: Literal["admitted", "rejected", "trained"]
    reason: str
    ordinal: int | None
    trained: Trained | None
    time: float


class InteractionRow(BaseModel):
    """The record of one choice of a request.

    ``decision`` is null if the interaction is undecided, or if ``decision_known`` is false because this process is
    still reading the decisions.
    """

    model_config = ConfigDict(extra="allow")

    id: str
    request: str
    job: str
    episode: str
    untrainable: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish: str
    text: str
    decision: InteractionDecision | None = None
    decision_known: bool = True


@router.get("/v1/models", response_model=ModelList)
async def list_models(caller: Reader, backend: BackendDep) -> Response:
    """List the models: training jobs, deployments, and final checkpoints of ended jobs (deployed on first request).

    Jobs and deployments appear under their names; ``served`` is false for a checkpoint that is not deployed.
    """
    found = [served for served in serving_of(backend).models() if _may_use(caller, served)]
    waiting = await backend.deployments.servable(caller.models)
    return Json(ModelList(data=[*map(_model, found), *map(_to_be_served, waiting)]))


@router.get("/v1/models/{model}", response_model=Model)
async def get_model(
    model: Annotated[str, Path(max_length=256, description="Name or id of a job")], caller: Reader, backend: BackendDep
) -> Response:
    """Show a model."""
    if not model.startswith(REFERENCE):
        return Json(_model(served_of(backend, model, caller)))
    origin = await _checkpoint_of(backend, model, caller)
    served = any(one.origin is not None and one.origin.checkpoint == origin.checkpoint for one in _all(backend))
    made = (await backend.jobs.get(origin.job)).status.finished_at
    return Json(Model(
        id=model, created=int(made.timestamp()) if made is not None else 0, job=origin.job, online=False,
        policy_version=origin.version, served=served, checkpoint=origin.checkpoint,
    ))  # fmt: skip


@router.get("/e/{episode_id}/v1/models", response_model=ModelList)
async def list_models_in_episode(episode_id: EpisodeId, caller: Reader, backend: BackendDep) -> Response:
    """List the models, for clients whose base URL is the address of an episode."""
    return await list_models(caller, backend)


@router.get("/e/{episode_id}/v1/models/{model}", response_model=Model)
async def get_model_in_episode(
    episode_id: EpisodeId,
    model: Annotated[str, Path(max_length=256, description="Name or id of a job")],
    caller: Reader,
    backend: BackendDep,
) -> Response:
    """Show a model, for clients whose base URL is the address of an episode."""
    return await get_model(model, caller, backend)


@router.post(
    "/v1/chat/completions",
    response_model=Completion,
    openapi_extra=body_schema(ChatBody),
    responses=_RESPONSES,
)
async def chat(request: Request, caller: Writer, backend: BackendDep) -> Response:
    """Answer a chat with the model's served version, and record the interaction. ``stream`` sends tokens as they come.

    ``model`` may also be a checkpoint of a job, `job:NAME@final`. If no rollout worker serves it, one loads it while
    the request waits, at most 30 s; after that the reply is 503 with `Retry-After`.
    """
    return await _chat(request, caller, backend, "")


@router.post(
    "/e/{episode_id}/v1/chat/completions",
    response_model=Completion,
    openapi_extra=body_schema(ChatBody),
    responses=_RESPONSES,
)
async def chat_in_episode(episode_id: EpisodeId, request: Request, caller: Writer, backend: BackendDep) -> Response:
    """Answer a chat as a turn of an episode."""
    return await _chat(request, caller, backend, episode_id)


@router.post(
    "/v1/completions",
    response_model=Completion,
    openapi_extra=body_schema(CompletionBody),
    responses=_RESPONSES,
)
async def complete(request: Request, caller: Writer, backend: BackendDep) -> Response:
    """Complete prompts (text or token ids), and record interactions. ``echo`` with ``logprobs`` scores the prompts."""
    return await _complete(request, caller, backend, "")


@router.post(
    "/e/{episode_id}/v1/completions",
    response_model=Completion,
    openapi_extra=body_schema(CompletionBody),
    responses=_RESPONSES,
)
async def complete_in_episode(episode_id: EpisodeId, request: Request, caller: Writer, backend: BackendDep) -> Response:
    """Complete prompts as a turn of an episode."""
    return await _complete(request, caller, backend, episode_id)


@router.get("/v1/interactions/{interaction}", response_model=InteractionRow)
async def get_interaction(
    interaction: Annotated[str, Path(max_length=64, description="Id of a response: a UUID, or chatcmpl- and a UUID")],
    caller: Annotated[Caller, require("jobs:read", reach="checked")],
    backend: BackendDep,
) -> Response:
    """Show the record of a choice: tokens, log-probs, versions, sampling settings, and the decision to train on the
    choice or not."""
    marked = marked_id(interaction)
    if marked is not None:
        for job in (await backend.jobs.index()).all():
            if job.mark == marked[1]:
                found = await serving_of(backend).interaction(job.id, marked[0])
                if found is not None:
                    if not caller.may_use(job.name, job.id):
                        break
                    return Json(found.row() | await _decision(backend, marked[0], found))
    raise NotFound(f"no interaction '{interaction}' is recorded")


async def _decision(backend: Backend, interaction: str, record: Interaction) -> dict[str, Any]:
    """Return the fields ``decision`` and ``decision_known`` of an interaction. ``decision_known`` is False if no index
    of decisions answers in time."""
    if backend.feedback is None:
        return {"decision": None, "decision_known": False}
    try:
        async with asyncio.timeout(DECISION_S):
            found = await backend.feedback.decisions([interaction])
    except (Unavailable, TimeoutError):
        return {"decision": None, "decision_known": False}
    decision = found.get(interaction) or backend.feedback.after_end(record)
    return {"decision": decision, "decision_known": True}


DIRECT = posts_of(router, ("/v1/chat/completions", "/v1/completions"))


async def _chat(request: Request, caller: Caller, backend: Backend, episode: str) -> Response:
    body = await read_model(request, ChatBody)
    return await _answer(request, caller, backend, body, episode, num_prompts=1)


async def _complete(request: Request, caller: Caller, backend: Backend, episode: str) -> Response:
    body = await read_model(request, CompletionBody)
    return await _answer(request, caller, backend, body, episode, num_prompts=len(body.prompts))


async def _answer(
    request: Request,
    caller: Caller,
    backend: Backend,
    body: ChatBody | CompletionBody,
    episode: str,
    *,
    num_prompts: int,
) -> Response:
    serving = serving_of(backend)
    draft = draft_of(body, await request.body(), request.headers, caller.id)
    retries = request.headers.get("x-stainless-retry-count", "")
    served = await _deployed(backend, body.model, caller)
    named = episode_of(episode, request.headers, body)
    ask = Ask(
        served=served, draft=draft, num_prompts=num_prompts, user=body.named_user,
        episode=own_episode(caller, named, served.job),
        retries=int(retries) if retries.isdecimal() else None, only_opened=bool(caller.episode),
        any_owner=caller.may("admin"),
    )  # fmt: skip
    await check_user(backend.limiter, caller, ask.user, serving.pseudonym)
    await backend.limiter.check_tokens(caller.id)
    try:
        answer = await _opened(backend, ask, body.model, caller)
    except PenstockError as error:
        raise as_problem(error, draft.constraint) from None
    usage = bool(body.stream_options and body.stream_options.include_usage)
    kind = ChatFormat if isinstance(body, ChatBody) else TextFormat
    charge = partial(backend.limiter.take_tokens, caller.id)
    return CompletionReply(serving, answer, kind(answer, bool(body.return_token_ids), usage), charge)


def serving_of(backend: Backend) -> Gateway:
    """Return the gateway of this process. Raises HttpProblem: 503 this process has none."""
    if backend.serving is None:
        raise HttpProblem(503, "no_gateway", "this process serves no models")
    return backend.serving


def served_of(backend: Backend, model: str, caller: Caller) -> Served:
    """Return a model by the name or id of its job. Raises HttpProblem: 404 no such model, or the key may not use it."""
    try:
        served = serving_of(backend).find(model)
    except NotFound:
        raise no_model(model) from None
    if not _may_use(caller, served):
        raise no_model(model)
    return served


def _may_use(caller: Caller, served: Served) -> bool:
    """Return True if the caller's key may use the model, or may use the job whose checkpoint the model serves."""
    origin = served.origin
    return caller.may_use(served.name, served.job) or (origin is not None and caller.may_use(origin.name, origin.job))


def _all(backend: Backend) -> list[Served]:
    return serving_of(backend).models()


async def _checkpoint_of(backend: Backend, model: str, caller: Caller) -> ModelOrigin:
    """Return the checkpoint that a ``model`` of the form `job:NAME@final` names.

    Raises:
        HttpProblem: 404 there is no such checkpoint, or the key may not use it.
    """
    try:
        origin = await backend.deployments.find(model)
    except (NotFound, ConfigError) as error:
        if caller.models is not None:  # the reason could reveal jobs that the key may not use
            raise no_model(model) from None
        raise HttpProblem(404, "model_not_found", str(error)) from None
    if not caller.may_use(origin.name, origin.job):
        raise no_model(model)
    return origin


async def _deployed(backend: Backend, model: str, caller: Caller) -> Served:
    """Return a model as ``served_of`` does; if ``model`` names a checkpoint that is not served yet, deploy it first.

    Raises:
        HttpProblem: 503 the deployment is not ready yet, or failed.
    """
    if not model.startswith(REFERENCE):
        return served_of(backend, model, caller)
    origin, serving = await _checkpoint_of(backend, model, caller), serving_of(backend)
    job = await backend.deployments.deploy(origin)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(APPEAR_S):
            while True:
                with contextlib.suppress(NotFound):
                    return serving.find(job)
                await _check_alive(backend, job)
                await asyncio.sleep(APPEAR_LOOK_S)
    text = f"'{model[:80]}' is being deployed as job '{job}'; ask again in a moment"
    raise HttpProblem(503, "deploying", text, headers={"Retry-After": "2"})


async def _check_alive(backend: Backend, job: str) -> None:
    """Raise HttpProblem (503) with the reason if the deployment failed."""
    status = (await backend.jobs.get(job)).status
    if status.phase == "failed":
        headers = {"Retry-After": "60", "x-should-retry": "false"}
        raise HttpProblem(503, "deployment_failed", f"deployment '{job}' failed: {status.message}", headers=headers)


async def _opened(backend: Backend, ask: Ask, model: str, caller: Caller) -> Any:
    """Send the request ``ask`` to the gateway; return the answer once a worker accepts the request. If the deployment
    of a checkpoint has ended, deploy the checkpoint again and repeat the request."""
    try:
        return await serving_of(backend).open(ask)
    except NotFound:
        if not model.startswith(REFERENCE):
            raise
        await _check_alive(backend, ask.served.job)
        return await serving_of(backend).open(replace(ask, served=await _deployed(backend, model, caller)))


def _model(served: Served) -> Model:
    return Model(
        id=served.name, created=served.created, job=served.job, online=served.online, policy_version=served.version,
        promoted_at=served.promoted_at, checkpoint=served.origin.checkpoint if served.origin is not None else None,
    )  # fmt: skip


def _to_be_served(found: Servable) -> Model:
    return Model(
        id=found.id, created=found.ended, job=found.job, online=False, policy_version=found.version, served=False
    )
