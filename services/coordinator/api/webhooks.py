"""Routes of webhooks: addresses that receive signed job events."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.idempotency import token_of
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.cloudevents import EVENT_TYPES
from penstock.shared.protocol.webhooks import DEFAULT_TYPES, DeliveryState, StoredWebhook, WebhookRecord

__all__ = ["router"]

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])
READ, WRITE = [require("jobs:read")], [require("jobs:write")]

WebhookId = Annotated[str, Path(pattern="^wh_[0-9a-f]{32}$", description="wh_ and 32 hex digits")]


def _exists(kind: str) -> str:
    """Return ``kind`` if it is an event type, or a prefix of event types followed by `*`; else raise ValueError."""
    start = kind.removesuffix("*")
    if kind in EVENT_TYPES or (kind != start and any(one.startswith(start) for one in EVENT_TYPES)):
        return kind
    near = difflib.get_close_matches(kind, EVENT_TYPES, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"no event has the type '{kind}'; {hint}there are: {', '.join(EVENT_TYPES)}")


EventType = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.]{0,62}\*?$"), AfterValidator(_exists)]
Types = Annotated[list[EventType], Field(min_length=1, max_length=32)]
Url = Annotated[str, Field(min_length=1, max_length=2000)]
Text = Annotated[str, Field(max_length=200)]


class WebhookRequest(BaseModel):
    """A new webhook. Each of ``types`` is an event type, or a prefix of event types followed by `*`."""

    model_config = ConfigDict(extra="forbid")

    url: Url = Field(description="http or https; no user or password")
    types: Types = list(DEFAULT_TYPES)
    job: Annotated[str, Field(pattern="^job_[0-9a-f]{32}$")] | None = Field(None, description="Only events of this job")
    description: Text = ""


class WebhookChange(BaseModel):
    """Changes of a webhook; `enabled: true` resumes deliveries where they stopped."""

    model_config = ConfigDict(extra="forbid")

    url: Url | None = None
    types: Types | None = None
    description: Text | None = None
    enabled: bool | None = None


class NewWebhook(WebhookRecord):
    """A new webhook; ``secret`` is not shown again."""

    secret: str


class Webhook(WebhookRecord):
    """A webhook and the progress of its deliveries."""

    deliveries: DeliveryState


class WebhookList(BaseModel):
    """All webhooks, oldest first."""

    object: Literal["list"] = "list"
    data: list[WebhookRecord]
    has_more: bool = False


class Trial(BaseModel):
    """Result of a test event: ``delivered`` if the receiver accepted it, else ``error``."""

    delivered: bool
    error: str = ""


@router.post("", status_code=201, response_model=NewWebhook, openapi_extra=body_schema(WebhookRequest))
async def create_webhook(
    request: Request, caller: Annotated[Caller, require("jobs:write")], backend: BackendDep
) -> Response:
    """Create a webhook: its address gets job events from now on, as CloudEvents 1.0, signed as in Standard Webhooks.

    A repetition with the same `Idempotency-Key` returns the webhook that it created, secret included.
    """
    wanted = await read_model(request, WebhookRequest)
    if wanted.job is not None:
        await backend.jobs.get(wanted.job)
    header = request.headers.get("idempotency-key")
    key = f"{caller.id}\n{token_of(header)}" if header is not None else ""
    fields = wanted.model_dump()
    hook = await _with_url(backend.webhooks.create(**fields, key=key))
    if {name: getattr(hook, name) for name in fields} != fields:
        detail = "this Idempotency-Key was used for another webhook, or for one that was changed since; use a new key"
        raise HttpProblem(422, "idempotency_key_reused", detail)
    headers = {"Location": f"/v1/webhooks/{hook.id}", "Cache-Control": "no-store"}
    return Json(NewWebhook(**hook.shown().model_dump(), secret=hook.secret), 201, headers)


@router.get("", response_model=WebhookList, dependencies=READ)
async def list_webhooks(backend: BackendDep) -> Response:
    """List the webhooks."""
    return Json(WebhookList(data=[hook.shown() for hook in await backend.webhooks.list_all()]))


@router.get("/{webhook_id}", response_model=Webhook, dependencies=READ)
async def get_webhook(webhook_id: WebhookId, backend: BackendDep) -> Response:
    """Show a webhook, with the last event that the receiver accepted, and the error if the delivery of the next event
    fails."""
    hook = await backend.webhooks.find(webhook_id)
    state = await backend.webhooks.state(webhook_id)
    return Json(Webhook(**hook.shown().model_dump(), deliveries=state))


@router.patch(
    "/{webhook_id}", response_model=WebhookRecord, dependencies=WRITE, openapi_extra=body_schema(WebhookChange)
)
async def change_webhook(request: Request, webhook_id: WebhookId, backend: BackendDep) -> Response:
    """Change, disable or enable a webhook. Events that occur while it is disabled are delivered once it is enabled
    again."""
    wanted = await read_model(request, WebhookChange)
    changes = wanted.model_dump(exclude_none=True)
    hooks = backend.webhooks
    hook = await (_with_url(hooks.change(webhook_id, changes)) if changes else hooks.find(webhook_id))
    return Json(hook.shown())


@router.delete("/{webhook_id}", status_code=204, dependencies=WRITE)
async def delete_webhook(webhook_id: WebhookId, backend: BackendDep) -> Response:
    """Delete a webhook."""
    await backend.webhooks.delete(webhook_id)
    return Response(status_code=204)


@router.post("/{webhook_id}/test", response_model=Trial, dependencies=WRITE)
async def try_webhook(webhook_id: WebhookId, backend: BackendDep) -> Response:
    """Post an event of type `rl.webhook.test.v1` once, now, and report whether the receiver accepted it."""
    error = await backend.webhooks.test(webhook_id)
    return Json(Trial(delivered=not error, error=error))


async def _with_url(work: Awaitable[StoredWebhook]) -> StoredWebhook:
    """Await ``work``, which stores a webhook, and return the webhook. Raises HttpProblem: 422 its address is not
    allowed."""
    try:
        return await work
    except ConfigError as error:
        flaw = Flaw(pointer="/url", detail=str(error))
        raise HttpProblem(422, "invalid_body", f"/url: {error}", errors=[flaw]) from None
