"""Conversion of rollout workers' chunks to OpenAI's objects: events of a stream, or one reply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.services.coordinator.serving.answer import Answer
from penstock.shared.protocol.live.inference import Chunk, ToolCall

__all__ = ["ChatFormat", "Format", "TextFormat"]

Json = dict[str, Any]


@dataclass
class Format:
    """Formatter of the chunks of one answer. ``token_ids``: include token ids."""

    answer: Answer
    token_ids: bool
    usage: bool
    """True: a stream ends with a chunk that has the token counts. Whole replies always have them."""

    def __post_init__(self) -> None:
        self._begun: set[int] = set()
        self._calls: defaultdict[int, int] = defaultdict(int)
        self._length: defaultdict[int, int] = defaultdict(int)

    # Methods that differ between chat and text

    prefix = ""
    whole_object = ""
    part_object = ""

    def delta(self, chunk: Chunk) -> Json:
        """Return the part of a streamed choice that ``chunk`` adds."""
        raise NotImplementedError

    def content(self, chunks: Sequence[Chunk]) -> Json:
        """Return the content of a choice in a reply."""
        raise NotImplementedError

    def logprobs(self, chunks: Sequence[Chunk]) -> Json | None:
        """Return the log-probs of the tokens in ``chunks``; None if not requested."""
        raise NotImplementedError

    # Shared methods

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        """Encode chunks as events of a stream."""
        return b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for chunk in chunks for part in self._parts(chunk))

    def end(self) -> bytes:
        """Encode the end of an event stream."""
        last = b""
        if self.usage:
            part = {**self._head(self.part_object, self.answer.version), "choices": [], "usage": self._usage()}
            last = b"data: " + orjson.dumps(part) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def whole(self, chunks: Sequence[Chunk]) -> Json:
        """Return the reply to a request that is not streamed, with the whole answer."""
        by_choice: defaultdict[int, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            by_choice[chunk.choice].append(chunk)
        version = max((chunk.version for chunk in chunks), default=self.answer.version)
        return {
            **self._head(self.whole_object, version),
            **({"prompt_token_ids": self.answer.prompt_ids[0]} if self.token_ids else {}),
            "choices": [self._choice(index, by_choice[index]) for index in sorted(by_choice)],
            "usage": self._usage(),
        }

    def message(self, chunks: Sequence[Chunk]) -> Json | None:
        """Return the assistant's message of the first choice, in the form in which a client sends the message back;
        None for a text completion."""
        return None

    def _parts(self, chunk: Chunk) -> Iterator[Json]:
        head = self._head(self.part_object, chunk.version if chunk.version >= 0 else self.answer.version)
        more: Json = {"usage": None} if self.usage else {}
        first = chunk.choice not in self._begun
        tells = bool(chunk.text or chunk.calls or chunk.finish)
        if not (tells or first or ((self.token_ids or chunk.pieces) and chunk.token_ids)):
            return
        choice: Json = {**self._named(chunk.choice), **self.delta(chunk), "logprobs": self.logprobs([chunk])}
        self._begun.add(chunk.choice)
        choice["finish_reason"] = chunk.finish or None
        if self.token_ids:
            choice["token_ids"] = chunk.token_ids if chunk.start >= 0 else []
            if first:
                head["prompt_token_ids"] = self._prompt(chunk.choice)
        yield {**head, "choices": [choice], **more}

    def _choice(self, index: int, chunks: Sequence[Chunk]) -> Json:
        choice: Json = {**self._named(index), **self.content(chunks), "logprobs": self.logprobs(chunks)}
        choice["finish_reason"] = chunks[-1].finish
        if self.token_ids:
            choice["token_ids"] = [token for chunk in chunks if chunk.start >= 0 for token in chunk.token_ids]
            choice["prompt_token_ids"] = self._prompt(index)
        return choice

    def _named(self, choice: int) -> Json:
        """Return the index and the interaction id of a choice, so that a client can send feedback on it. The id is None
        if the client wants no record."""
        request = self.answer.request
        return {"index": choice, "interaction_id": request.ids[choice] if request.store else None}

    def _prompt(self, choice: int) -> list[int]:
        return self.answer.prompt_ids[choice // self.answer.request.n]

    def _head(self, kind: str, version: int) -> Json:
        return {
            "id": self.prefix + self.answer.id,
            "object": kind,
            "created": int(self.answer.request.started),
            "model": f"{self.answer.served.name}@{version}",
            "system_fingerprint": f"v{version}",
        }

    def _usage(self) -> Json:
        prompt, generated = sum(map(len, self.answer.prompt_ids)), self.answer.num_generated
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class ChatFormat(Format):
    """Formatter of `chat.completion` and `chat.completion.chunk`."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    part_object = "chat.completion.chunk"

    def delta(self, chunk: Chunk) -> Json:
        """See ``Format``."""
        delta: Json = {}
        if chunk.choice not in self._begun or chunk.text:
            delta["content"] = chunk.text
        if chunk.choice not in self._begun:
            delta["role"] = "assistant"
        if chunk.calls:
            start = self._calls[chunk.choice]
            delta["tool_calls"] = [{"index": start + i, **_call(call)} for i, call in enumerate(chunk.calls)]
            self._calls[chunk.choice] += len(chunk.calls)
        return {"delta": delta}

    def content(self, chunks: Sequence[Chunk]) -> Json:
        """See ``Format``."""
        calls = [_call(call) for chunk in chunks for call in chunk.calls]
        text = "".join(chunk.text for chunk in chunks)
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def logprobs(self, chunks: Sequence[Chunk]) -> Json | None:
        """See ``Format``."""
        if self.answer.request.logprobs < 0:
            return None
        rows = [row for chunk in chunks for row in _rows(chunk)]
        return {"content": rows, "refusal": None}

    def message(self, chunks: Sequence[Chunk]) -> Json | None:
        """See ``Format``."""
        message: Json = self.content([chunk for chunk in chunks if chunk.choice == 0])["message"]
        return message


class TextFormat(Format):
    """Formatter of `text_completion`."""

    prefix = "cmpl-"
    whole_object = part_object = "text_completion"

    def delta(self, chunk: Chunk) -> Json:
        """See ``Format``."""
        return {"text": chunk.text}

    def content(self, chunks: Sequence[Chunk]) -> Json:
        """See ``Format``."""
        return {"text": "".join(chunk.text for chunk in chunks)}

    def logprobs(self, chunks: Sequence[Chunk]) -> Json | None:
        """See ``Format``; the first token of an echoed prompt has none."""
        wanted = self.answer.request.logprobs
        if wanted < 0:
            return None
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if wanted else None, "text_offset": []}
        for chunk in chunks:
            for place, piece in enumerate(chunk.pieces):
                found["tokens"].append(piece)
                found["token_logprobs"].append(chunk.logprobs[place])
                found["text_offset"].append(self._length[chunk.choice])
                self._length[chunk.choice] += len(piece)
                if wanted:
                    found["top_logprobs"].append(_likeliest(chunk, place))
        return found


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _rows(chunk: Chunk) -> Iterator[Json]:
    for place, piece in enumerate(chunk.pieces):
        top = chunk.top[place] if chunk.top else []
        row = _row(piece, chunk.logprobs[place])
        yield {**row, "top_logprobs": [_row(text, logprob) for text, logprob in top]}


def _row(piece: str, logprob: float | None) -> Json:
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}


def _likeliest(chunk: Chunk, place: int) -> dict[str, float] | None:
    """Return log-probs by token text: of the most likely tokens and of the sampled token at position ``place``.

    Tokens with equal text have one entry, the largest. None if the position has no log-probs.
    """
    if chunk.logprobs[place] is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in chunk.top[place] if chunk.top else []:
        found.setdefault(text, logprob)
    sampled = chunk.logprobs[place]
    if sampled is not None:
        found.setdefault(chunk.pieces[place], sampled)
    return found
