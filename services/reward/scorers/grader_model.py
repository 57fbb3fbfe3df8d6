"""Grader part that requests a number from a language model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import orjson

from penstock.services.reward.scorers.endpoint import Call, Endpoint, variable
from penstock.services.reward.scorers.grader_parts import GradingError, Sample, Score, fill
from penstock.shared.config.rewards.graders import ScoreModelGrader
from penstock.shared.config.rewards.scorers import GraderScorer
from penstock.shared.errors import ScoringError

__all__ = ["ScoreModelPart"]

_QUOTED = 200
_SCHEMA = {
    "type": "object",
    "properties": {"result": {"type": "number"}},
    "required": ["result"],
    "additionalProperties": False,
}
_ASKED = "Answer with a JSON object whose field `result` is the score, a number from {low:g} to {high:g}."


class ScoreModelPart:
    """Requests ``{"result": number}`` from an OpenAI-compatible chat endpoint."""

    def __init__(self, config: ScoreModelGrader, scorer: GraderScorer) -> None:
        """Open the endpoint. Raises GradingError if the key is missing."""
        assert scorer.base_url is not None, "checked with the configuration"
        self._config = config
        headers = {}
        if scorer.api_key_env is not None:
            try:
                headers["Authorization"] = "Bearer " + variable(scorer.api_key_env, "a score_model grader")
            except ScoringError as error:
                raise GradingError("model_grader_server_error", str(error)) from None
        self._endpoint = Endpoint(
            f"{scorer.base_url}/chat/completions", headers, concurrency=scorer.concurrency,
            timeout_s=scorer.timeout_s, repeatable=True,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def grade(self, samples: Sequence[Sample], item: dict[str, Any], deadline: float) -> list[Score]:
        """Return one score or error per sample; equal requests to the model are sent only once."""
        bodies: list[bytes | GradingError] = [self._body(sample, item) for sample in samples]
        asked = list(dict.fromkeys(body for body in bodies if isinstance(body, bytes)))
        replies = self._endpoint.post_all([Call(body) for body in asked], max(0.0, deadline - time.monotonic()))
        scores = dict(zip(asked, map(self._score, replies), strict=True))
        return [scores[body] if isinstance(body, bytes) else body for body in bodies]

    def _body(self, sample: Sample, item: dict[str, Any]) -> bytes | GradingError:
        config, sampling = self._config, self._config.sampling_params
        low, high = config.range
        try:
            messages = [{"role": m.role, "content": fill(m.text, item, sample)} for m in config.input]
        except GradingError as error:
            return error
        messages.append({"role": "system", "content": _ASKED.format(low=low, high=high)})
        schema = {"name": "score", "strict": True, "schema": _SCHEMA}
        given = sampling.model_dump(exclude_none=True, exclude={"max_completions_tokens"})
        if sampling.max_completions_tokens is not None:
            given["max_completion_tokens"] = sampling.max_completions_tokens
        wanted = {"type": "json_schema", "json_schema": schema}
        body = {"model": config.model, "messages": messages, "response_format": wanted, **given}
        return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)

    def _score(self, reply: bytes | ScoringError) -> Score:
        if isinstance(reply, ScoringError):
            return GradingError("model_grader_server_error", str(reply))
        try:
            choice = orjson.loads(reply)["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason")
            refusal, text = message.get("refusal"), message["content"]
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            return GradingError("model_grader_server_error", f"no chat completion: {reply[:_QUOTED]!r}")
        if refusal:
            return GradingError("model_grader_refusal_error", str(refusal)[:_QUOTED])
        if finish == "length":
            return GradingError("truncated_observation_error", "the reply was cut: raise max_completions_tokens")
        return self._number(text)

    def _number(self, text: object) -> Score:
        try:
            number = orjson.loads(text)["result"] if isinstance(text, str) else None
        except (orjson.JSONDecodeError, LookupError, TypeError):
            number = None
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return GradingError("model_grader_parse_error", f"no number 'result' in {str(text)[:_QUOTED]!r}")
        low, high = self._config.range
        if not low <= number <= high:
            return GradingError("model_grader_parse_error", f"the score {number:g} lies outside {low:g} to {high:g}")
        return float(number)
