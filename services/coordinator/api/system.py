"""Routes about the deployment: limits, version, health, Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from penstock import __version__
from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.guard import (
    BODY_BYTES_PER_S,
    MAX_BODY_BYTES,
    MAX_FILE_BYTES,
    MAX_HEADERS,
    MAX_LARGE_BYTES,
)
from penstock.services.coordinator.api.http.documents import MAX_DEPTH, MAX_VALUES, MAX_YAML_VALUES
from penstock.services.coordinator.api.http.idempotency import KEEP_S
from penstock.services.coordinator.api.http.occupancy import WAIT_S
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.jobs.jobs import MAX_PAGE, MAX_WAIT_S
from penstock.services.coordinator.api.live.completion_bodies import MAX_CHOICES
from penstock.services.coordinator.api.live.completion_form import MAX_SCHEMA_BYTES, MAX_TOOLS
from penstock.services.coordinator.api.live.feedback_tokens import DEFAULT_S, LONGEST_S, SHORTEST_S
from penstock.services.coordinator.api.schemas import (
    ConnectionLimits,
    DocumentLimits,
    FeedbackLimits,
    Health,
    KeyLimits,
    Limits,
    Version,
)
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.feedback.posts import (
    MAX_COMMENT,
    MAX_ITEMS,
    MAX_TAG_KEY,
    MAX_TAG_VALUE,
    MAX_TAGS,
    MAX_TEXT,
    MAX_TOKENS,
)
from penstock.services.coordinator.serving.gateway import MAX_IN_FLIGHT
from penstock.services.coordinator.shares import KEY_SHARE
from penstock.services.coordinator.webhooks.store import MAX_WEBHOOKS
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol.codec import SCHEMA
from penstock.shared.protocol.live.interaction import MAX_TURNS
from penstock.shared.runtime import metrics

__all__ = ["router"]

router = APIRouter(tags=["system"])
HEALTH_S = 0.5
"""Seconds for which health requests share the result of one check; they need no key, so anyone can send many."""

FEEDBACK = FeedbackLimits(
    max_item_bytes=MAX_BODY_BYTES,
    max_interaction_bytes=MAX_LARGE_BYTES,
    max_interaction_tokens=MAX_TOKENS,
    max_episode_turns=MAX_TURNS,
    max_batch_bytes=MAX_LARGE_BYTES,
    max_batch_items=MAX_ITEMS,
    max_tags=MAX_TAGS,
    max_tag_key=MAX_TAG_KEY,
    max_tag_value=MAX_TAG_VALUE,
    max_comment=MAX_COMMENT,
    max_text=MAX_TEXT,
    token_min_s=SHORTEST_S,
    token_default_s=DEFAULT_S,
    token_max_s=LONGEST_S,
)

DOCUMENTS = DocumentLimits(
    max_values=MAX_VALUES,
    max_yaml_values=MAX_YAML_VALUES,
    max_depth=MAX_DEPTH,
    max_schema_bytes=MAX_SCHEMA_BYTES,
    max_tools=MAX_TOOLS,
    max_choices=MAX_CHOICES,
)


@router.get("/v1/limits", response_model=Limits)
async def limits(backend: BackendDep) -> Response:
    """Show limits of the API and guarantees of the deployment. ``durability`` says whether an accepted job also
    survives a crash of the operating system."""
    settings = backend.settings
    own = Limits(
        max_body_bytes=MAX_BODY_BYTES,
        max_large_body_bytes=MAX_LARGE_BYTES,
        max_file_bytes=MAX_FILE_BYTES,
        max_batch_items=MAX_ITEMS,
        feedback=FEEDBACK,
        max_page=MAX_PAGE,
        max_wait_s=MAX_WAIT_S,
        rate_limit=settings.rate_limit,
        live_rate_limit=settings.live_rate_limit,
        user_rate_limit=settings.user_rate_limit or None,
        token_rate_limit=settings.token_rate_limit or None,
        address_rate_limit=settings.address_rate_limit or None,
        connections=_connections(settings),
        per_key=_of_key(settings),
        documents=DOCUMENTS,
        max_files=settings.max_files,
        files_bytes=settings.files_bytes,
        max_webhooks=MAX_WEBHOOKS,
        idempotency_keep_s=KEEP_S,
        authentication=backend.ring.required,
    )
    return Json({**await backend.health.limits(), **own.model_dump()})


def _connections(settings: ServiceSettings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=settings.http_connections,
        max_per_address=settings.http_connections_per_address,
        max_head_bytes=settings.http_head_bytes,
        max_headers=MAX_HEADERS,
        head_s=settings.http_head_s,
        body_s=settings.http_body_s,
        body_bytes_per_s=BODY_BYTES_PER_S,
    )


def _of_key(settings: ServiceSettings) -> KeyLimits:
    return KeyLimits(
        max_requests_at_once=settings.key_concurrency,
        max_large_bodies=settings.key_large_bodies,
        max_large_bodies_of_all=settings.large_bodies,
        large_body_wait_s=WAIT_S,
        max_requests_of_model=MAX_IN_FLIGHT,
        tenant_share=settings.tenant_share,
        key_share=KEY_SHARE,
    )


@router.get("/v1/version", response_model=Version)
async def version() -> Response:
    """Show the versions of the running build."""
    return Json(Version(version=__version__, schema_number=SCHEMA))


@router.get("/healthz", response_model=Health)
async def healthz() -> Response:
    """Report that the process is alive."""
    return Json({"ok": True, "checks": {}})


@router.get("/readyz", response_model=Health, responses={503: {"model": Health}})
async def readyz(backend: BackendDep) -> Response:
    """Report readiness: 503 with the failed checks if the process cannot work. A loss of Redis is not a failure."""
    ok, checks = await backend.feeds.once("health", HEALTH_S, backend.health.check)
    if backend.volatile.configured:
        detail = "in use" if await backend.volatile.answers() else "away, using memory"
        checks = {**checks, "redis": {"ok": True, "detail": detail}}
    return Json({"ok": ok, "checks": checks}, 200 if ok else 503)


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[require("metrics:read")],
    responses={200: {"content": {"text/plain": {}}}},
)
async def prometheus() -> Response:
    """Export metrics of this process for Prometheus. The process's health port serves the same metrics without a
    key."""
    return Response(metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})
