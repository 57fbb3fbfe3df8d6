"""Bodies of feedback: one item, a JSON array, or JSON lines. Each item is validated separately, and every flaw has a
JSON pointer."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from penstock.services.coordinator.api.guard import MAX_BODY_BYTES
from penstock.services.coordinator.api.http.bodies import read_parsed
from penstock.services.coordinator.api.http.documents import MAX_VALUES, bound_values, items_of, step, too_many_flaws
from penstock.services.coordinator.feedback.posts import (
    KIND_TAGS,
    MAX_ITEMS,
    MAX_TOKENS,
    POST,
    POSTS,
    PostedInteraction,
)
from penstock.services.coordinator.problems import Flaw, HttpProblem

__all__ = ["NDJSON", "read_batch", "read_post"]

JSON, NDJSON = "application/json", "application/x-ndjson"
MAX_LINES = 1 << 16
"""Maximum number of lines of a body, including empty ones."""

FAST_BYTES = 256 << 10
"""Arrays up to this size (bytes) are parsed as a whole, twice as fast as item by item."""

MAX_ITEM_VALUES = 3 * MAX_TOKENS + MAX_VALUES
"""Maximum number of JSON values of one item: the tokens of an interaction, their log-probs, and all other values."""

Read = Any | HttpProblem
"""A validated post, or the HTTP problem with its flaws."""


async def read_post(request: Request) -> Any:
    """Return the body as one post (``FeedbackPost``).

    Raises:
        HttpProblem: 400 not JSON, 413 too large for its kind, 415 unsupported media type, 422 not valid.
    """
    _media_type(request, JSON)
    found = await read_parsed(request, _parse)
    if isinstance(found, HttpProblem):
        raise found
    return found


async def read_batch(request: Request) -> list[Read]:
    """Return the items of a JSON array or of JSON lines, in order; an HTTP problem stands for each invalid item.

    Raises:
        HttpProblem: 400 not JSON, 413 too many items, 415 unsupported media type, 422 not an array, or an empty one.
    """
    kind = _media_type(request, JSON, NDJSON)
    return await read_parsed(request, _parse_lines if kind == NDJSON else _parse_array)


def _media_type(request: Request, *known: str) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in known:
        raise HttpProblem(
            415, "unsupported_media_type", f"Content-Type '{kind[:80]}' is not known here; send {' or '.join(known)}"
        )
    return kind


def _parse(body: bytes) -> Read:
    """Parse and validate one post; return it, or the HTTP problem with its flaws."""
    try:
        bound_values(body, MAX_ITEM_VALUES)
        post = POST.validate_json(body)
    except HttpProblem as problem:
        return problem
    except ValidationError as error:
        return too_many_flaws(error) or _problem(error)
    except ValueError as error:
        return HttpProblem(400, "malformed_json", f"the body is not valid JSON: {error}")
    if len(body) > MAX_BODY_BYTES and not isinstance(post, PostedInteraction):
        detail = f"an item that is no interaction has at most {MAX_BODY_BYTES} bytes"
        return HttpProblem(413, "too_large", detail, max_bytes=MAX_BODY_BYTES)
    return post


def _parse_lines(body: bytes) -> list[Read]:
    if body.count(b"\n") > MAX_LINES:
        raise HttpProblem(413, "too_many_items", f"a batch has at most {MAX_ITEMS} items and {MAX_LINES} lines")
    lines = [line for line in body.split(b"\n") if line.strip()]
    return [_parse(line) for line in _bounded(lines)]


def _parse_array(body: bytes) -> list[Read]:
    try:
        if len(body) <= FAST_BYTES:  # no item can exceed its size limit
            return list(_bounded(POSTS.validate_json(body)))
    except ValidationError:
        pass  # at least one item has a flaw: parse each alone
    found = [_parse(text) for text in _bounded(items_of(body, MAX_ITEMS))]
    for problem in found:
        if isinstance(problem, HttpProblem) and problem.code == "malformed_json":
            raise problem
    return found


def _bounded(items: list[Any]) -> list[Any]:
    if len(items) > MAX_ITEMS:
        raise HttpProblem(413, "too_many_items", f"a batch has at most {MAX_ITEMS} items, found {len(items)}")
    if not items:
        detail = "a batch has at least one item"
        raise HttpProblem(422, "invalid_body", detail, errors=[Flaw(pointer="", detail=detail)])
    return items


def _problem(error: ValidationError) -> HttpProblem:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    if found[0]["type"] == "json_invalid":
        return HttpProblem(400, "malformed_json", f"the body is not valid JSON: {found[0]['msg']}")
    flaws = [Flaw(pointer=_pointer(item["loc"]), detail=item["msg"].removeprefix("Value error, ")) for item in found]
    first = f"{flaws[0].pointer or '/'}: {flaws[0].detail}"
    more = f" (and {len(flaws) - 1} more)" if len(flaws) > 1 else ""
    return HttpProblem(422, "invalid_feedback", f"the feedback is not valid: {first}{more}", errors=flaws[:20])


def _pointer(loc: tuple[int | str, ...]) -> str:
    """Return the JSON pointer (RFC 6901), without the leading union tag, which the body does not contain."""
    parts = loc[1:] if loc and loc[0] in KIND_TAGS else loc
    return "".join(step(str(part)) for part in parts)
