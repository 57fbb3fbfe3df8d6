"""Commands about feedback on live interactions."""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import orjson
import typer

from penstock.cli.exits import FAILED, Commands
from penstock.cli.printing import Json, console, note, number, seconds_of, show_done, show_json, show_line, table
from penstock.client import Client
from penstock.client.answers import base_url, find_api_key
from penstock.shared.errors import ConfigError, DataError

__all__ = ["app"]

app = typer.Typer(name="feedback", cls=Commands, help="Feedback: post, show the status, retract.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id that the API returned.")]


@app.command()
def send(
    *,
    target: Annotated[str, typer.Argument(help="Id of the response, or of the episode (ep_...).")],
    metric: Annotated[str, typer.Argument(help="A metric that the job declares, reward, or comment.")],
    value: Annotated[str, typer.Argument(help="true, false, a number, or text.")],
    id: Annotated[str | None, typer.Option(help="Id of the item; a repeated id has no effect.")] = None,
    final: Annotated[bool, typer.Option("--final", help="No more feedback follows: end the episode.")] = False,
    comment: Annotated[str | None, typer.Option(help="Reason of the judgement.")] = None,
    user: Annotated[str | None, typer.Option(help="User who judged; stored as a pseudonym.")] = None,
    as_json: Json = False,
) -> None:
    """Post one verdict; it is on disk when the command ends."""
    inference, episode = (None, target) if target.startswith("ep_") else (target, None)
    more: dict[str, Any] = {"final": final or None, "comment": comment, "user": user}
    with Client() as client:
        reply = client.feedback(metric, _value(value, metric), inference=inference, episode=episode, id=id, **more)
    if as_json:
        show_json(reply)
        return
    typer.echo(reply.feedback_id)
    said = "known already" if reply.duplicate else "stored"
    note(f"{said} for job {reply.job}; its target is {reply.target.replace('_', ' ')}")


@app.command()
def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, one item each; - for standard input.")],
    as_json: Json = False,
) -> None:
    """Post feedback items from a file; items that this key posted before have no effect. Exit 1 if any is refused."""
    key = find_api_key(base_url(None))
    with Client(api_key=key or None) as client:
        rows = client.feedback_batch(_named(_items(file), key))
    refused = [(place, row) for place, row in enumerate(rows, 1) if row.problem is not None]
    if as_json:
        for row in rows:
            show_line(row)
    else:
        for place, row in refused:
            note(f"item {place}: {row.status} {(row.problem or {}).get('detail', '')}")
        repeated = sum(row.duplicate for row in rows)
        typer.echo(f"{len(rows) - len(refused)} of {len(rows)} items stored, {repeated} of them before")
    if refused:
        raise typer.Exit(FAILED)


@app.command()
def status(id: Id, as_json: Json = False) -> None:
    """Show the status of a feedback item."""
    with Client() as client:
        item = client.feedback_status(id)
    if as_json:
        show_json(item)
        return
    trained = item.trained
    rows = [
        ("id", item.feedback_id),
        ("job", item.job),
        ("said", item.metric or item.kind),
        ("status", f"{item.status} {item.reason}".strip()),
        ("interactions", ", ".join(item.interactions)),
        ("trained", f"update {trained.step}, version {trained.version}" if trained else ""),
        ("revision", number(item.revision)),
        ("too late", f"revision {item.late_revision}" if item.late_revision else ""),
    ]
    console().print(table(("FIELD", "VALUE"), rows))


@app.command()
def retract(id: Id, as_json: Json = False) -> None:
    """Retract a feedback item; needs the scope feedback:admin."""
    with Client() as client:
        reply = client.retract(id)
    said = "is trained on already, or about to be: too late" if reply.too_late else "is retracted"
    show_done(f"feedback {reply.feedback_id} {said}", reply, as_json)


@app.command()
def token(
    target: Annotated[str, typer.Argument(help="Id of the response, or of the episode (ep_...).")],
    metric: Annotated[str, typer.Argument(help="A metric that the job declares.")],
    expires: Annotated[str | None, typer.Option(help="Lifetime, like 90m or 7d; default: a day.")] = None,
    as_json: Json = False,
) -> None:
    """Create a token with which a web page posts one verdict, and print it; it is not shown again."""
    inference, episode = (None, target) if target.startswith("ep_") else (target, None)
    with Client() as client:
        made = client.feedback_tokens.create(
            metric, inference=inference, episode=episode, expires_in_s=seconds_of(expires)
        )
    if as_json:
        show_json(made)
    else:
        typer.echo(made.token)
        note(f"it becomes feedback {made.feedback_id} at {made.url}, until {made.expires_at.isoformat()}")


def _value(text: str, metric: str) -> bool | float | str:
    """Return the value of ``text`` if it is a JSON boolean or number; otherwise return ``text`` itself. All values of
    the metrics `comment` and `demonstration` stay texts."""
    if metric in ("comment", "demonstration"):
        return text
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _named(items: Iterable[dict[str, Any]], key: str) -> Iterator[dict[str, Any]]:
    """Yield feedback items. An item without an id gets one, derived from its content, the number of equal items before
    it, and the API key.

    Thus a line has one effect even if its file is posted again, also with lines added at its end, but two equal lines
    of one file are two items. Only those who know the key can predict an id and post another item under it first.
    """
    secret = key.encode()
    said: Counter[bytes] = Counter()
    for item in items:
        named = item
        if item.get("feedback_id") is None:
            digest = hashlib.sha256(orjson.dumps(item, option=orjson.OPT_SORT_KEYS)).digest()
            own = hmac.digest(secret, b"%d\n" % said[digest] + digest, "sha256")
            said[digest] += 1
            named = {**item, "feedback_id": str(UUID(bytes=own[:16], version=5))}
        yield named


def _items(file: Path) -> Iterator[dict[str, Any]]:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    for place, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{file}:{place}: not JSON: {error}") from None
        if not isinstance(item, dict):
            raise DataError(f"{file}:{place}: an item is an object")
        yield item
