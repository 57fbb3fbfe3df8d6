"""Dashboard: static files beside the API, with a security policy that lets the page load nothing from other hosts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

__all__ = ["HEADERS", "is_asset", "router"]

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # blob: is for videos, which the page fetches with its key. Trusted types keep text from becoming markup or code.
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Asset:
    """One static file, and the ETag of its bytes."""

    data: bytes
    media_type: str
    etag: str


def is_asset(path: str) -> bool:
    """Return True if ``path`` is a page or a static file, which is served without a key."""
    return path in ("/", "/docs") or path.startswith("/assets/")


@router.get("/")
async def page(request: Request) -> Response:
    """Serve ``index.html``."""
    return _serve(request, "index.html")


@router.get("/assets/{name:path}")
async def asset(request: Request, name: str) -> Response:
    """Serve a static file that the page loads."""
    return _serve(request, name)


def _serve(request: Request, name: str) -> Response:
    found = _assets().get(name)
    if found is None:
        raise HTTPException(404, "no such file of the page")
    headers = HEADERS | {"ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)


@cache
def _assets() -> dict[str, Asset]:
    """Read the static files of the dashboard folder; return them by relative path. Requests can reach no other file."""
    folder = files("penstock.services.coordinator").joinpath("dashboard")
    return {name: _read(file) for name, file in _walk(folder) if PurePosixPath(name).suffix in TYPES}


def _walk(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        found += _walk(entry, f"{prefix}{entry.name}/") if entry.is_dir() else [(prefix + entry.name, entry)]
    return found


def _read(file: Traversable) -> Asset:
    data = file.read_bytes()
    return Asset(data, TYPES[PurePosixPath(file.name).suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"')
