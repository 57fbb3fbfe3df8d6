"""A scorer process: opens scorers and scores completions one by one. May be killed at any moment.

Started by ``process.py`` as ``python -m penstock.services.reward.worker FD PARENT``; FD is its end of a socket pair, so
output of user code goes to standard error and cannot reach the channel.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

from pydantic import TypeAdapter

from penstock.services.reward.channel import Decoder, Open, Opened, Result, Score, ToProcess, encode
from penstock.services.reward.scorers import Closable, Described, GroupScorer, Scorer, open_scorer
from penstock.shared.config.rewards.scorers import ScorerConfig
from penstock.shared.errors import ScoringError
from penstock.shared.runtime.user_process import described, die_with

__all__ = ["main"]

_MAX_ERROR_CHARS = 600

Named = list[tuple[str, Scorer | GroupScorer]]


def main() -> None:
    """Execute the messages that arrive on the channel, until it closes: ``Open`` opens scorers, and ``Score`` has them
    score completions."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # a child process of user code must not keep the channel open
    die_with(parent, "reward")
    channel = socket.socket(fileno=descriptor)
    scorers: Named = []
    for message in _messages(channel):
        if isinstance(message, Open):
            scorers, error = _open(message)
            about = {name: scorer.about for name, scorer in scorers if isinstance(scorer, Described)}
            channel.sendall(encode(Opened(error, about)))
        elif isinstance(message, Score):
            for result in _results(scorers, message):
                channel.sendall(encode(result))
    for _, scorer in scorers:
        if isinstance(scorer, Closable):
            scorer.close()


def _messages(channel: socket.socket) -> Iterator[Any]:
    decoder = Decoder(ToProcess)
    while data := channel.recv(1 << 20):
        yield from decoder.feed(data)


def _open(message: Open) -> tuple[Named, str]:
    adapter: TypeAdapter[ScorerConfig] = TypeAdapter(ScorerConfig)
    scorers: Named = []
    for spec in message.scorers:
        config = adapter.validate_python(spec)
        try:
            scorers.append((config.name or config.type, open_scorer(config)))
        except ScoringError as error:
            return [], str(error)
        except (Exception, SystemExit) as error:  # user code may raise anything on import
            return [], described(f"opening scorer '{config.name or config.type}'", error)
    return scorers, ""


def _results(scorers: Named, request: Score) -> Iterator[Result]:
    """Yield one result per completion. Group scorers run first; their time is part of the first result's
    ``seconds``."""
    started = time.monotonic()
    columns = {
        place: _column(name, scorer, request)
        for place, (name, scorer) in enumerate(scorers)
        if isinstance(scorer, GroupScorer)
    }
    for index in range(len(request.completions)):
        yield _score(scorers, columns, request, index, started)
        started = time.monotonic()


def _column(name: str, scorer: GroupScorer, request: Score) -> Sequence[float | ScoringError]:
    """Return the scores of one scorer for a whole group; if the scorer fails, all completions fail."""
    size = len(request.completions)
    try:
        scores = scorer.score_group(request.prompt, request.completions, request.answer, request.row)
    except ScoringError as error:
        return [error] * size
    except (Exception, SystemExit) as error:  # a library that it uses may raise anything
        return [ScoringError(described(f"scorer '{name}'", error))] * size
    assert len(scores) == size, f"{name} scored {len(scores)} of {size} completions"
    return scores


def _score(
    scorers: Named, columns: Mapping[int, Sequence[float | ScoringError]], request: Score, index: int, started: float
) -> Result:
    """Return the scores of one completion, or the error of the first scorer that fails."""
    scores: list[float] = []
    problem = ""
    for place, (name, scorer) in enumerate(scorers):
        try:
            if isinstance(scorer, GroupScorer):
                value: object = columns[place][index]
            else:
                value = scorer.score(request.prompt, request.completions[index], request.answer, request.row)
            scores.append(_number(value, name))
        except ScoringError as error:
            problem = str(error)
        except (Exception, SystemExit) as error:  # user code may raise anything
            problem = described(f"scorer '{name}'", error)
        if problem:
            scores = []
            break
    return Result(index, scores, problem[:_MAX_ERROR_CHARS], time.monotonic() - started)


def _number(value: object, name: str) -> float:
    if isinstance(value, ScoringError):
        raise value
    if not isinstance(value, SupportsFloat):
        raise ScoringError(f"scorer '{name}' returned a {type(value).__name__}; it must return a number")
    number = float(value)
    if not math.isfinite(number):
        raise ScoringError(f"scorer '{name}' returned {number}; it must return a finite number")
    return number


if __name__ == "__main__":
    main()
