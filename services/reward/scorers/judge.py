"""Scorer that requests a grade from a language model."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import redis
from redis.exceptions import RedisError

from penstock.services.reward.scorers.base import need_answer
from penstock.services.reward.scorers.endpoint import Call, Endpoint, variable
from penstock.shared.config.rewards.scorers import JudgeScorer
from penstock.shared.config.service import load_settings
from penstock.shared.data.template import Template
from penstock.shared.errors import DataError, ScoringError

__all__ = ["Judge", "ReplyCache"]


log = logging.getLogger(__name__)

_MAX_ENTRIES = 8192
_KEEP_S = 7 * 24 * 3600
_TIMEOUT_S = 0.25
_PAUSE_S = 10.0
_PREFIX = "penstock:judge:"


class ReplyCache:
    """Cache of judge replies, in memory and in Redis. If Redis is unavailable, only the memory is used for a while."""

    def __init__(self, url: str | None) -> None:
        """Open the cache at ``url`` (Redis or Valkey); None: in memory only."""
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._closed_until = 0.0
        self._client = (
            redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) if url else None
        )

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the cached replies by key."""
        found = {key: self._memory[key] for key in keys if key in self._memory}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing and self._client is not None and time.monotonic() >= self._closed_until:
            try:
                values = self._client.mget([_PREFIX + key for key in missing])
            except (RedisError, OSError) as error:
                self._away(error)
            else:
                there = {key: value.decode() for key, value in zip(missing, values, strict=True) if value is not None}
                self._remember(there)
                found |= there
        for key in found:
            if key in self._memory:
                self._memory.move_to_end(key)
        return found

    def add(self, replies: Mapping[str, str]) -> None:
        """Cache replies. In memory, the least recently used replies are dropped first."""
        self._remember(replies)
        if replies and self._client is not None and time.monotonic() >= self._closed_until:
            try:
                with self._client.pipeline(transaction=False) as pipeline:
                    for key, reply in replies.items():
                        pipeline.set(_PREFIX + key, reply, ex=_KEEP_S)
                    pipeline.execute()
            except (RedisError, OSError) as error:
                self._away(error)

    def _remember(self, replies: Mapping[str, str]) -> None:
        self._memory.update(replies)
        while len(self._memory) > _MAX_ENTRIES:
            self._memory.popitem(last=False)

    def _away(self, error: Exception) -> None:
        self._closed_until = time.monotonic() + _PAUSE_S
        log.warning("the judge's cache is away (%s); asking without it for %g s", error, _PAUSE_S)


_QUOTED = 200


class Judge:
    """Requests grades from an OpenAI-compatible chat endpoint. A reply without a usable grade fails the completion."""

    def __init__(self, config: JudgeScorer) -> None:
        """Open the endpoint. Raises ScoringError if the API key is missing or the template is invalid."""
        self._config = config
        headers = {}
        if config.api_key_env is not None:
            headers["Authorization"] = "Bearer " + variable(config.api_key_env, "scorer 'judge'")
        try:
            self._template = Template(config.template, "template of scorer 'judge'")
        except DataError as error:
            raise ScoringError(str(error)) from None
        self._url = f"{config.base_url}/chat/completions"
        self._endpoint = Endpoint(
            self._url, headers, concurrency=config.concurrency, timeout_s=config.timeout_s, repeatable=True
        )
        self._cache = ReplyCache(load_settings().redis_url) if config.cache else None
        self._pattern = re.compile(config.pattern, re.DOTALL)
        self.about = f"{config.model} at {config.base_url}"

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()
        if self._cache is not None:
            self._cache.close()

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """Return grades from 0 to 1. Sends equal requests once.

        Raises:
            ScoringError: the template cannot be filled in.
        """
        bodies = [self._body(prompt, completion, answer, row) for completion in completions]
        keys = [hashlib.sha256(self._url.encode() + b"\n" + body).hexdigest() for body in bodies]
        replies: dict[str, str | ScoringError] = {}
        if self._cache is not None:
            replies.update(self._cache.find(keys))
        ask = {key: body for key, body in zip(keys, bodies, strict=True) if key not in replies}
        answers = self._endpoint.post_all([Call(body) for body in ask.values()], self._config.deadline_s)
        replies |= {key: _text(found) for key, found in zip(ask, answers, strict=True)}
        grades = {key: self._grade(reply) for key, reply in replies.items()}
        if self._cache is not None:
            good = {key: replies[key] for key in ask if isinstance(grades[key], float)}
            self._cache.add({key: text for key, text in good.items() if isinstance(text, str)})
        return [grades[key] for key in keys]

    def _body(self, prompt: str, completion: str, answer: str | None, row: dict[str, Any]) -> bytes:
        if "answer" in self._template.fields:
            need_answer(answer, "judge")
        try:
            given = {"prompt": prompt, "completion": completion, "answer": answer}
            text = self._template.render({**row, **given}, "the row")
        except DataError as error:
            raise ScoringError(str(error)) from None
        config = self._config
        messages = [{"role": "user", "content": text}]
        if config.system is not None:
            messages.insert(0, {"role": "system", "content": config.system})
        body: dict[str, Any] = {"model": config.model, "messages": messages}
        if config.temperature is not None:
            body["temperature"] = config.temperature
        if config.max_tokens is not None:
            body["max_tokens"] = config.max_tokens
        if config.json_schema is not None:
            schema = {"name": "grade", "strict": True, "schema": config.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return orjson.dumps(body | config.request, option=orjson.OPT_SORT_KEYS)

    def _grade(self, text: str | ScoringError) -> float | ScoringError:
        if isinstance(text, ScoringError):
            return text
        number = self._from_json(text) if self._config.json_schema is not None else self._from_text(text)
        low, high = self._config.scale
        if isinstance(number, ScoringError):
            return number
        if not low <= number <= high:
            return ScoringError(f"the judge's grade {number:g} lies outside scale {low:g} to {high:g}")
        return (number - low) / (high - low)

    def _from_text(self, text: str) -> float | ScoringError:
        matches = self._pattern.findall(text)
        try:
            number = float(matches[-1]) if matches else math.nan
        except ValueError:
            number = math.nan
        return number if math.isfinite(number) else ScoringError(f"no grade in the judge's reply: {text[:_QUOTED]!r}")

    def _from_json(self, text: str) -> float | ScoringError:
        try:
            number = orjson.loads(text)[self._config.json_field]
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
            number = None
        if isinstance(number, bool) or not isinstance(number, int | float):
            return ScoringError(f"no number '{self._config.json_field}' in the judge's reply: {text[:_QUOTED]!r}")
        return float(number)


def _text(reply: bytes | ScoringError) -> str | ScoringError:
    """Return the text of the model's reply, or an error."""
    if isinstance(reply, ScoringError):
        return reply
    try:
        choice = orjson.loads(reply)["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
        text, finish = None, None
    if finish == "length":
        return ScoringError("the judge's reply was cut short: raise max_tokens of scorer 'judge'")
    if not isinstance(text, str):
        return ScoringError(f"the judge's endpoint answers with no chat completion: {reply[:_QUOTED]!r}")
    return text
