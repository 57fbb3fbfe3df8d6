"""``penstock chat``: talk to a model, and rate its answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import httpx
import orjson
import typer

from penstock.cli.printing import Json, note, show_line
from penstock.client import Client
from penstock.client.answers import authorities, base_url, default_headers, error_of, unreachable
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import MetricConfig
from penstock.shared.errors import ConfigError, ProtocolError, Unavailable

__all__ = ["chat"]

TIMEOUT = httpx.Timeout(60.0, read=300.0)
NEW = "new"
QUESTION = "good? y/n, Enter to say nothing: "


def chat(
    model: Annotated[str, typer.Argument(help="Name of a running job or deployment, or job:NAME@final.")],
    text: Annotated[str | None, typer.Argument(help="Send this and exit; without it, start a conversation.")] = None,
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; default: the job's. Answers at another one are never trained on."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; default: the job's.")
    ] = None,
    episode: Annotated[
        str | None, typer.Option(help="Episode of the conversation; 'new' opens one and ends it on exit.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Metric that y and n set; default: the job's first.")] = None,
    rate: Annotated[
        bool | None, typer.Option("--rate/--no-rate", help="Ask after each answer; default: in a terminal.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Talk to a model; y or n after an answer is posted as feedback. Ctrl-D ends the conversation."""
    terminal = sys.stdin.isatty()
    with Client() as client, _http() as http:
        thumbs = _thumbs(client, model, metric) if (terminal if rate is None else rate) else None
        opened = client.episodes.open(model).id if episode == NEW else None
        talk = Conversation(http, model, episode=opened or episode or "")
        talk.sampling |= {"temperature": temperature, "max_tokens": max_tokens}
        talk.messages += [{"role": "system", "content": system}] if system else []
        try:
            for line in _lines(terminal) if text is None else [text]:
                _show(talk, line, as_json)
                _rate(client, talk, thumbs, as_json)
        finally:
            if opened is not None:
                client.episodes.end(opened)


@dataclass
class Answer:
    """The model's answer; ``interaction`` is the id that feedback refers to."""

    interaction: str = ""
    episode: str = ""
    model: str = ""
    policy_version: int | None = None
    """Policy version at the start of the answer; None if the server sent none."""
    text: str = ""
    finish_reason: str | None = None


@dataclass
class Conversation:
    """The conversation so far; ``last`` is the newest answer."""

    http: httpx.Client
    model: str
    episode: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Answer = field(default_factory=Answer)

    def ask(self, text: str) -> Iterator[str]:
        """Send a message; yield the pieces of the answer as they arrive.

        Raises:
            PenstockError: the request failed, or the answer is incomplete.
        """
        self.messages.append({"role": "user", "content": text})
        sampling = {name: value for name, value in self.sampling.items() if value is not None}
        body = {"model": self.model, "messages": self.messages, "stream": True, **sampling}
        headers = {"X-Episode-Id": self.episode} if self.episode else {}
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                self.last = _begun(response.headers)
                for event in _events(response):
                    self.last.model = event.get("model", "")
                    for choice in event.get("choices", []):
                        self.last.finish_reason = choice.get("finish_reason")
                        for piece in _pieces(choice.get("delta", {})):
                            self.last.text += piece
                            yield piece
        except httpx.TransportError as error:
            raise unreachable(str(self.http.base_url).rstrip("/"), error) from None
        self.messages.append({"role": "assistant", "content": self.last.text})


@dataclass(frozen=True)
class Thumbs:
    """Metric, and its values for a thumb up and a thumb down."""

    metric: str
    up: bool | float
    down: bool | float


def _begun(headers: httpx.Headers) -> Answer:
    version = headers.get("x-policy-version", "")
    return Answer(
        interaction=headers.get("x-interaction-id", ""),
        episode=headers.get("x-episode-id", ""),
        policy_version=int(version) if version.isdecimal() else None,
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer. Raises Unavailable, or ProtocolError if the stream ends early."""
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        event = orjson.loads(line[6:])
        if "error" in event:
            raise Unavailable(f"the answer broke off: {event['error'].get('message', '')}")
        yield event
    raise ProtocolError("the stream ended before the answer did")


def _pieces(delta: dict[str, Any]) -> Iterator[str]:
    """Yield the new text of a chunk."""
    if delta.get("content"):
        yield delta["content"]
    for call in delta.get("tool_calls") or []:
        yield orjson.dumps(call["function"]).decode()


def _show(talk: Conversation, text: str, as_json: bool) -> None:
    """Send ``text`` and print the answer: piece by piece, or as JSON once it is complete."""
    for piece in talk.ask(text):
        if not as_json:
            typer.echo(piece, nl=False)
    if as_json:
        show_line({"type": "answer", **asdict(talk.last)})
    else:
        typer.echo()


def _http() -> httpx.Client:
    url = base_url(None)
    return httpx.Client(
        base_url=url, headers=default_headers(None, url), timeout=TIMEOUT, verify=authorities(url)
    )  # fmt: skip


def _thumbs(client: Client, model: str, wanted: str | None) -> Thumbs | None:
    """Return the metric and values that rate a single answer; None if the model accepts no such feedback.

    Raises:
        ConfigError: the job does not declare the metric ``wanted``.
    """
    found = client.models.show(model)
    if not found.online:
        note(f"{model} does not learn from feedback")
        return None
    job = parse_job(client.get(found.job).spec)
    assert isinstance(job, OnlineJob)
    metrics = {name: metric for name, metric in job.online.metrics.items() if metric.level == "interaction"}
    name = wanted or next(iter(metrics), "")
    if name in metrics:
        return _values(name, metrics[name])
    if wanted is None:
        note(f"{model} has no metric that judges a single answer")
        return None
    raise ConfigError(f"--metric {wanted}: {model} declares {', '.join(metrics) or 'none'} for single answers")


def _values(name: str, metric: MetricConfig) -> Thumbs:
    """Return the values of a metric that earn the highest reward (thumb up) and the lowest (thumb down)."""
    if metric.type == "boolean":
        up = metric.weight * (metric.when_true - metric.when_false) >= 0
        return Thumbs(name, up, not up)
    low, high = (bound / metric.weight if metric.weight else 0.0 for bound in metric.clip)
    return Thumbs(name, high, low)


def _rate(client: Client, talk: Conversation, thumbs: Thumbs | None, as_json: bool) -> None:
    """Ask the user to rate the newest answer, and post the rating."""
    while thumbs is not None:
        typer.echo(QUESTION, nl=False, err=True)
        said = sys.stdin.readline().strip().lower()
        if not said:
            return
        if said in ("y", "n"):
            value = thumbs.up if said == "y" else thumbs.down
            reply = client.feedback(thumbs.metric, value, inference=talk.last.interaction)
            note(f"{thumbs.metric}: stored as {reply.feedback_id}")
            if as_json:
                row = {"interaction": talk.last.interaction, "metric": thumbs.metric, "value": value}
                show_line({"type": "feedback", "feedback_id": reply.feedback_id, **row})
            return


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the lines that the user types, until the end of the input."""
    while True:
        if terminal:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
