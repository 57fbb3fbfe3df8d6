"""One choice of a live request in progress: its tokens, the text sent to the client, and its record. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.services.rollout.conversations.text_stream import TextStream, ToolCalls
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.generation import Likely, Sample, Sampling, Scores, Span, Token
from penstock.shared.protocol.ids import derive_seed
from penstock.shared.protocol.live.inference import Begun, Chunk, InferenceRequest, ToolCall
from penstock.shared.protocol.live.interaction import FinishReason, Interaction, bare_id

__all__ = ["Choice", "Decode"]

Decode = Callable[[list[int]], str]


@dataclass(eq=False)
class Choice:
    """Choice ``index`` of ``request``. ``stop_tokens`` end the choice and are not part of its text.

    ``sampling`` is the client's sampling merged with the job's defaults. Output tokens come from one engine
    request, or from several in sequence if an engine was interrupted.
    """

    request: InferenceRequest
    index: int
    prompt_ids: list[int]
    sampling: Sampling
    stop_tokens: frozenset[int]
    decode: Decode
    spell: Decode
    """Decoder whose text includes special tokens."""
    prompt: str = ""
    """Text of the prompt."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    first_token: float = 0.0
    pauses: int = 0
    _num_sent: int = 0
    """Number of output tokens already put into chunks."""
    _top: list[Likely] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text = TextStream(self.decode, self.sampling.stop_strings)
        self._tools = ToolCalls(self.id) if self.request.tools else None

    @property
    def id(self) -> str:
        """Id of the interaction."""
        return self.request.ids[self.index]

    @property
    def engine_id(self) -> str:
        """Id of the current engine request."""
        return f"{self.id}/{self.pauses}"

    @property
    def ended(self) -> bool:
        """True once an interrupted choice contains a stop string: engines do not find a stop string that spans the
        interruption."""
        return self.pauses > 0 and self._text.stopped and len(self.token_ids) >= self.sampling.min_new_tokens

    def resume(self, begun: Begun) -> None:
        """Continue after the tokens that another worker generated. The client already has their text."""
        for span in begun.spans:
            self._add(begun.token_ids[span.start : span.end], begun.logprobs[span.start : span.end], span)
        self._read_one_by_one(self.token_ids)
        self._top += [[] for _ in self.token_ids]
        self._num_sent = len(self.token_ids)
        self.pauses = 1

    def rest(self) -> tuple[list[int], Sampling]:
        """Return prompt and sampling parameters of the next engine request. An interruption changes the seed."""
        if not self.token_ids:
            return self.prompt_ids, self.sampling
        done, s = len(self.token_ids), self.sampling
        sampling = replace(
            s, max_new_tokens=s.max_new_tokens - done, min_new_tokens=max(0, s.min_new_tokens - done),
            seed=derive_seed(s.seed or 0, "resumed", done),
        )  # fmt: skip
        return [*self.prompt_ids, *self.token_ids], sampling

    def push(self, token: Token) -> Chunk:
        """Add a token that the engine streamed, and return its chunk. Engines do not stream the token that ends a
        request; ``take`` adds that one."""
        self._add([token.token_id], [token.logprob], token)
        self._top.append(token.top)
        return self._chunk(*self._read_one_by_one(self.token_ids[self._num_sent :]))

    def take(self, sample: Sample, before: int) -> None:
        """Add the tokens of a finished engine request that ``push`` has not added. ``before`` is the number of output
        tokens that the choice had when the request began."""
        for span in sample.spans:
            start = max(span.start, len(self.token_ids) - before)
            if start < span.end:
                self._add(sample.token_ids[start : span.end], sample.logprobs[start : span.end], span)
                self._top += sample.top[start : span.end]

    def last(self, finish: str, *, recorded: bool) -> Chunk:
        """Return the chunk that ends the choice. Call ``finished`` first."""
        return self._chunk(*self._ending, finish=finish, recorded=recorded)

    def finished(self, reason: str) -> FinishReason:
        """Decode the last tokens to text and tool calls; return the finish reason for the client."""
        self.first_token = self.first_token or bus_time()
        unread = self.token_ids[self._num_sent :]
        if reason == "stop" and unread and unread[-1] in self.stop_tokens:
            unread = unread[:-1]
        text, calls = self._read(unread)
        rest = self._text.close()
        if self._tools is not None:
            more, found = self._tools.push(rest)
            rest, calls = more + self._tools.close(), calls + found
            self.calls += found
        self.text += rest
        self._ending = text + rest, calls
        if reason == "client_disconnected":
            return "client_disconnected"
        if self._tools is not None and self._tools.num_calls:
            return "tool_calls"
        return "length" if reason == "length" and not self._text.stopped else "stop"

    def echo(self, scores: Scores | None) -> Chunk:
        """Return the prompt as a chunk; its first token has no log-prob."""
        ids = self.prompt_ids
        logprobs: list[float | None] = [None, *scores.logprobs] if scores is not None else []
        top = [[], *(self._named(likely) for likely in scores.top)] if scores is not None and scores.top else []
        pieces = [self.spell([token]) for token in ids] if scores is not None else []
        return Chunk(
            self.request.id, self.index, -1, list(ids), logprobs, scores.version if scores is not None else -1,
            self.decode(list(ids)), pieces=pieces, top=top,
        )  # fmt: skip

    def interaction(self, *, job: str, finish: FinishReason, untrainable: str, template: str) -> Interaction:
        """Return the record of the choice."""
        request = self.request
        return Interaction(
            id=self.id, request=request.ids[self.index - self.index % request.n], index=self.index % request.n, job=job,
            episode=bare_id(request.episode) or request.episode, alone=request.alone, key_id=request.key_id,
            user=request.user, split=request.split, untrainable=untrainable, prompt_ids=self.prompt_ids,
            token_ids=self.token_ids, logprobs=self.logprobs, spans=self.spans, sampling=self.sampling, finish=finish,
            prompt=self.prompt, constraint=request.constraint.asked_by if request.constraint is not None else "",
            template=template, body_digest=request.body_digest, text=self.text, calls=self.calls,
            tool_calls_valid=self._tools.valid if self._tools is not None else None, tags=request.tags,
            started=request.started, first_token=self.first_token, ended=bus_time(),
        )  # fmt: skip

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], by: Span | Token) -> None:
        if token_ids and not self.token_ids:
            self.first_token = bus_time()
        start, end = len(self.token_ids), len(self.token_ids) + len(token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        if self.spans and (self.spans[-1].version, self.spans[-1].weights) == (by.version, by.weights):
            start = self.spans.pop().start
        self.spans.append(Span(by.version, start, end, by.weights))

    def _read_one_by_one(self, token_ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """Decode tokens one at a time; return the text and the tool calls that have become complete.

        The released text depends on how many tokens are decoded at once. Decoding singly makes it depend on the tokens
        alone, so that another worker with the same tokens knows what text the client has.
        """
        text, calls = "", list[ToolCall]()
        for token_id in token_ids:
            more, found = self._read([token_id])
            text, calls = text + more, calls + found
        return text, calls

    def _read(self, token_ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """Decode tokens together; return the text and the tool calls that have become complete."""
        text = self._text.push(token_ids)
        calls: list[ToolCall] = []
        if self._tools is not None:
            text, calls = self._tools.push(text)
        self.text += text
        self.calls += calls
        return text, calls

    def _chunk(self, text: str, calls: list[ToolCall], *, finish: str = "", recorded: bool = False) -> Chunk:
        start, self._num_sent = self._num_sent, len(self.token_ids)
        wanted, ids = self.request.logprobs, self.token_ids[start:]
        return Chunk(
            self.request.id, self.index, start, ids, list(self.logprobs[start:]),
            self.spans[-1].version if self.spans else -1, text, calls,
            [self.spell([token]) for token in ids] if wanted >= 0 else [],
            [self._named(likely) for likely in self._top[start:]] if wanted > 0 else [],
            finish, recorded, self.spans[-1].weights if self.spans else "",
        )  # fmt: skip

    def _named(self, likely: Likely) -> list[tuple[str, float]]:
        return [(self.spell([token]), logprob) for token, logprob in likely]
