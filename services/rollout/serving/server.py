"""Server of a job's live requests: takes them from the bus, runs them on the engine, and records the samples."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.candidate import Candidate
from penstock.services.rollout.conversations.rendering import Prompt, Renderer
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.held_weights import WeightRing
from penstock.services.rollout.serving.choice import Choice
from penstock.services.rollout.serving.outbox import Outbox
from penstock.services.rollout.serving.reading import Reader
from penstock.services.rollout.serving.recorder import Recorder
from penstock.services.rollout.serving.redaction import RecordRedactor
from penstock.shared.config.online.redaction import RedactionConfig
from penstock.shared.config.sampling import SamplingConfig
from penstock.shared.errors import ConfigError, PenstockError, ProtocolError, Unavailable, WeightsError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.generation import GenRequest, Sampling, Token
from penstock.shared.protocol.live.inference import (
    SIGN_EVERY_S,
    Cancel,
    ClientSampling,
    Failure,
    InferenceReply,
    InferenceRequest,
    Present,
)
from penstock.shared.protocol.live.interaction import CANARY, CONSTRAINED, NOT_COMPARED
from penstock.shared.runtime import metrics
from penstock.shared.runtime.tasks import end_tasks, unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["MAX_SILENT", "NOT_REPLAYABLE", "InferenceServer", "Presence", "as_trained", "replayable", "sampling_for"]

logger = logging.getLogger(__name__)


NOT_REPLAYABLE = "sampling_not_replayable"


def sampling_for(
    config: SamplingConfig, client: ClientSampling, *, num_prompt: int, max_length: int, constrained: bool = False
) -> Sampling:
    """Merge the sampling options of a client's request with the job's defaults. If the client sets no
    ``max_new_tokens``, the job's default is reduced until prompt and answer fit into ``max_length`` tokens.

    A ``constrained`` answer ends where its grammar ends, however short it is.

    Raises:
        ConfigError: prompt and completion exceed the model's maximum length.
    """
    room = max_length - num_prompt
    most = client.max_new_tokens if client.max_new_tokens is not None else max(1, min(config.max_new_tokens, room))
    if most > room:
        raise ConfigError(
            f"{num_prompt} prompt tokens and {most} new ones exceed the {max_length} that the model takes: "
            "shorten the prompt or lower max_tokens"
        )
    least = client.min_new_tokens if client.min_new_tokens is not None else config.min_new_tokens
    if constrained:
        least = 0
    return Sampling(
        max_new_tokens=most,
        min_new_tokens=min(least, most),
        temperature=config.temperature if client.temperature is None else client.temperature,
        top_p=1.0 if client.top_p is None else client.top_p,
        top_k=0 if client.top_k is None else client.top_k,
        frequency_penalty=client.frequency_penalty,
        presence_penalty=client.presence_penalty,
        logit_bias=tuple(client.logit_bias),
        stop_token_ids=tuple({*config.stop_token_ids, *client.stop_token_ids}),
        stop_strings=tuple(client.stop or config.stop),
        ignore_eos=client.ignore_eos or (config.ignore_eos and not constrained),
        seed=client.seed,
    )


def as_trained(client: ClientSampling) -> ClientSampling:
    """Return the client's sampling without options that would prevent the trainer from reproducing the distribution.

    The temperature already is the job's: the gateway sets it, because workers that continue an answer need the same
    one.
    """
    return replace(
        client, top_p=None, top_k=None, min_new_tokens=None, frequency_penalty=0.0,
        presence_penalty=0.0, logit_bias=[],
    )  # fmt: skip


def replayable(sampling: Sampling, config: SamplingConfig) -> bool:
    """Return True if the trainer can reproduce the sampled distribution.

    The trainer cannot reproduce truncation, penalties, logit biases, a minimum length, or another temperature.
    """
    nudged = sampling.frequency_penalty or sampling.presence_penalty or sampling.logit_bias
    plain = sampling.top_p == 1 and sampling.top_k == 0 and not sampling.min_new_tokens and not nudged
    return plain and sampling.temperature == config.temperature


MAX_SILENT = 6
"""Number of consecutive checks without a heartbeat after which a gateway, with its clients, counts as lost."""


class Presence:
    """Finds lost gateways: counts the rounds of checks since the last heartbeat of each gateway.

    Rounds are counted, not seconds, because a process that was itself stalled received no heartbeats.
    """

    def __init__(self) -> None:
        self._silent: Counter[str] = Counter()

    def seen(self, gateway: str) -> None:
        """Record a heartbeat."""
        del self._silent[gateway]

    def look(self, busy: Iterable[str]) -> set[str]:
        """Count one more check for each gateway in ``busy`` (those with requests here); return the lost gateways."""
        busy = set(busy)
        self._silent = Counter({gateway: self._silent[gateway] + 1 for gateway in busy})
        return {gateway for gateway, looks in self._silent.items() if looks > MAX_SILENT}


QUEUE = "rollout"
WAITING_PER_SLOT = 4
"""Limit of choices in progress, as a multiple of ``max_running``; a request that would exceed it is refused."""
RETRY_S = 0.1

TRIALS = metrics.counter(
    "canary_answers", "Answers to conversations of a version on trial, by who wrote them.", ("by",)
)


@dataclass(eq=False)
class _Live:
    request: InferenceRequest
    choices: list[Choice]
    sampling: SamplingConfig
    """The job's sampling when the request was accepted."""
    engine: Engine
    """Engine that generates the answer: the serving engine, or the engine with the version on trial."""
    task: asyncio.Task[None] | None = None
    gone: bool = False
    """True once the client disconnected."""
    cut: bool = False
    """True once the gateway counts as lost."""
    dropped: bool = False
    """True once the gateway no longer wants the answer from this worker."""


@dataclass(eq=False)
class InferenceServer:
    """Serves the live requests of one job on one worker.

    ``run`` serves until cancelled; after ``drain``, no more requests are accepted, and those in progress are finished.

    Args:
        max_running: number of sequences that the engine decodes at once.
        version: returns the policy version that the engine serves.
        hold_s: how long a request waits for an interrupted engine, in seconds.
        forced_sampling: True to use the job's sampling, whatever clients request.
        redaction: rules for data that must not be stored; None: store all.
        candidate: engine with the version on trial; None without one.
        held: weights of earlier versions, to score answers that were not sampled here.
    """

    bus: Bus
    worker_id: str
    job: str
    engine: Engine
    tokenizer: PreTrainedTokenizerFast
    sampling: SamplingConfig
    max_running: int
    version: Callable[[], int]
    hold_s: float
    template_args: dict[str, Any] = field(default_factory=dict)
    forced_sampling: bool = False
    redaction: RedactionConfig | None = None
    candidate: Candidate | None = None
    held: WeightRing = field(default_factory=lambda: WeightRing(0))

    def __post_init__(self) -> None:
        self.id = f"{self.worker_id}.{secrets.token_hex(4)}"
        self._backend: Any = self.tokenizer.backend_tokenizer
        wanted = self.redaction
        redactor = None if wanted is None else RecordRedactor(wanted, self.tokenizer, self._spell)
        self._recorder, self._outbox = Recorder(self.bus, self.job, redactor), Outbox(self.bus, self.id)
        self._texts: dict[int, str] = {}
        """Decoded text of single tokens."""
        self._live: dict[str, _Live] = {}
        self._gateways = Presence()
        self._aborts: set[asyncio.Task[int]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = asyncio.Event()

    @property
    def num_requests(self) -> int:
        """Number of requests in progress."""
        return len(self._live)

    async def run(self) -> None:
        """Serve until cancelled or drained."""
        self._renderer = await asyncio.to_thread(Renderer, self.tokenizer, self.template_args)
        running = (self._recorder.run(), self._outbox.run(), self._watch_gateways())
        background = [asyncio.create_task(one) for one in running]
        try:
            async with AsyncExitStack() as stack:
                cancels = await self.bus.subscribe(subjects.inference_worker(self.id), self._on_cancel)
                await stack.enter_async_context(cancels)
                signs = await self.bus.subscribe(subjects.inference_present(self.id), self._on_present)
                await stack.enter_async_context(signs)
                server = await self.bus.serve(subjects.inference(self.job), self._take, queue=QUEUE)
                await stack.enter_async_context(server)
                reader = Reader(self.job, self._renderer, self.tokenizer, self.engine, self.held)
                readers = await self.bus.serve(subjects.reading(self.job), reader.read, queue=QUEUE, max_concurrent=4)
                await stack.enter_async_context(readers)
                await self._leaving.wait()
                await server.close()
                await self._idle.wait()
                await self._outbox.flush()
        finally:
            left = list(self._live.values())
            tasks = [live.task for live in left if live.task is not None] + background + list(self._aborts)
            await end_tasks(tasks)
            for live in left:
                stops = Failure(live.request.id, "Unavailable", "the rollout worker stops")
                self._outbox.close(live.request.gateway, live.request.id, stops)
            await self._outbox.flush()

    def amend(self, sampling: SamplingConfig) -> None:
        """Set the job's sampling for new requests; requests in progress keep theirs."""
        self.sampling = sampling

    def drain(self) -> None:
        """Accept no more requests; ``run`` returns when those in progress are answered."""
        self._leaving.set()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _take(self, data: bytes) -> bytes:
        request, _ = unpack(data, InferenceRequest)
        if request.constraint is not None:
            await self.engine.prepare(request.constraint)
        live = self._live.get(request.id)
        if live is not None and live.task is not None and (live.dropped or live.request != request):
            live.task.cancel()  # sent chunks were lost on the way
            await asyncio.wait([live.task])
            live = None
        if live is None:
            in_hand = sum(len(other.choices) for other in self._live.values())
            if in_hand and in_hand + len(request.ids) > WAITING_PER_SLOT * self.max_running:
                return pack(InferenceReply(worker=self.id, accepted=False, version=self.version()), job=self.job)
            prompts = await asyncio.to_thread(self._renderer.prompts, request)
            live = self._open(request, prompts)
        prompt_ids = [choice.prompt_ids for choice in live.choices[:: request.n]]
        version = self.version() if live.engine is self.engine else request.canary
        reply = InferenceReply(worker=self.id, accepted=True, version=version, prompt_ids=prompt_ids)
        return pack(reply, job=self.job)

    def _open(self, request: InferenceRequest, prompts: list[Prompt]) -> _Live:
        if len(request.ids) != len(prompts) * request.n:
            raise ProtocolError(f"{len(request.ids)} ids for {request.n} choices of {len(prompts)} prompts")
        stop = frozenset({*self.sampling.stop_token_ids, *request.sampling.stop_token_ids, *self.engine.stop_ids})
        asked = as_trained(request.sampling) if self.forced_sampling else request.sampling
        choices = []
        for index in range(len(request.ids)):
            prompt_ids, text = prompts[index // request.n]
            sampling = sampling_for(
                self.sampling,
                asked,
                num_prompt=len(prompt_ids),
                max_length=self.engine.max_length,
                constrained=request.constraint is not None,
            )
            sampling = replace(sampling, seed=request.sampling.seed + index)
            choices.append(Choice(request, index, prompt_ids, sampling, stop, self._decode, self._spell, text))
            if index in request.begun:
                choices[-1].resume(request.begun[index])
        live = self._live[request.id] = _Live(request, choices, self.sampling, self._engine_for(request))
        self._idle.clear()
        self._outbox.open(request.gateway, request.id)
        live.task = asyncio.create_task(self._serve(live), name=f"inference {request.id}")
        return live

    def _engine_for(self, request: InferenceRequest) -> Engine:
        """Return the engine that answers ``request``: the engine with the version on trial, if the request asks for
        that version and this worker has it; else the serving engine."""
        if request.canary < 0:
            return self.engine
        candidate = self.candidate
        is_here = candidate is not None and candidate.serves(request.canary)
        TRIALS.labels("candidate" if is_here else "served").inc()
        return candidate.engine if candidate is not None and is_here else self.engine

    async def leave_candidate(self) -> None:
        """Move the answers in progress on the candidate's engine, which serves a version on trial, to the serving
        engine. Called before the candidate's engine loads another version."""
        moved = [live for live in self._live.values() if live.engine is not self.engine]
        for live in moved:
            live.engine = self.engine
        if self.candidate is not None and moved:
            await self.candidate.engine.abort([choice.engine_id for live in moved for choice in live.choices])

    def _decode(self, token_ids: list[int]) -> str:
        """Decode tokens. Called for each token of each stream, so it bypasses the slow wrapper around the tokenizer."""
        if len(token_ids) != 1:
            return str(self._backend.decode(token_ids, skip_special_tokens=True))
        text = self._texts.get(token_ids[0])
        if text is None:
            text = self._texts[token_ids[0]] = str(self._backend.decode(token_ids, skip_special_tokens=True))
        return text

    def _spell(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    async def _serve(self, live: _Live) -> None:
        request = live.request
        failure = None
        try:
            error = await unexpected(self._answer(live))
            if error is not None:
                failure = _failure(request.id, error)
        finally:
            del self._live[request.id]
            self._outbox.close(request.gateway, request.id, failure)
            if not self._live:
                self._idle.set()

    async def _answer(self, live: _Live) -> None:
        wanted = live.request.wanted or range(len(live.choices))
        tasks = [asyncio.create_task(self._answer_choice(live, live.choices[index])) for index in wanted]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await end_tasks(tasks)

    async def _answer_choice(self, live: _Live, choice: Choice) -> None:
        request = live.request
        if request.echo and not choice.token_ids:
            wanted = request.logprobs >= 0
            top = max(0, request.logprobs)
            scores = await live.engine.score(choice.prompt_ids, top_logprobs=top) if wanted else None
            self._outbox.put(request.gateway, choice.echo(scores))
        reason = await self._complete(live, choice)
        finish = choice.finished(reason)
        cut = finish == "client_disconnected" and not live.gone
        repeatable = replayable(choice.sampling, live.sampling)
        drawn = CONSTRAINED if request.constraint is not None else "" if repeatable else NOT_REPLAYABLE
        untrainable = _untrainable(request.untrainable, broken_off=live.gone or cut, drawn=drawn)
        recorded = False
        if request.store and choice.token_ids:
            record = choice.interaction(
                job=self.job, finish=finish, untrainable=untrainable, template=self._renderer.digest
            )
            recorded = await (self._recorder.record_cut if cut else self._recorder.record)(record)
        self._outbox.put(request.gateway, choice.last(finish, recorded=recorded))

    async def _complete(self, live: _Live, choice: Choice) -> str:
        """Generate a choice to its end, even if the engine is interrupted (failed update, sleep); return how it ended.

        Raises:
            Unavailable: the engine was interrupted for longer than ``hold_s``.
        """
        clock = asyncio.get_running_loop().time
        waiting_since: float | None = None
        while not (live.gone or live.cut):
            before = len(choice.token_ids)
            try:
                finish = await self._generate(live, choice)
            except (WeightsError, Unavailable) as error:
                why, live.engine = str(error), self.engine
            else:
                if finish:
                    return finish
                why = "the engine ended its running requests"
            choice.pauses += 1
            if len(choice.token_ids) > before:
                waiting_since = None
            waiting_since = waiting_since or clock()
            if clock() - waiting_since > self.hold_s:
                raise Unavailable(f"no answer within {self.hold_s:g} s: {why}")
            if not (live.gone or live.cut):
                await asyncio.sleep(RETRY_S)
        return "client_disconnected"

    async def _generate(self, live: _Live, choice: Choice) -> str:
        """Run one engine request for the rest of a choice; return the finish reason, '' after an interruption."""
        request, engine = live.request, live.engine
        prompt_ids, sampling = choice.rest()
        before = len(choice.token_ids)
        if choice.ended or sampling.max_new_tokens < 1:
            return "stop" if choice.ended else "length"

        def push(token: Token) -> None:
            if choice.ended:
                return
            self._outbox.put(request.gateway, choice.push(token))
            if choice.ended:
                self._abort(engine, [choice.engine_id])

        wanted = GenRequest(
            request_id=choice.engine_id, prompt_ids=prompt_ids, sampling=sampling,
            top_logprobs=max(0, request.logprobs), constraint=request.constraint, answered=len(choice.token_ids),
        )  # fmt: skip
        sample = (await engine.generate(wanted, push if request.stream or choice.pauses else None)).samples[0]
        if choice.ended:
            return "stop"
        choice.take(sample, before)
        return "" if sample.finish == "abort" else sample.finish

    def _on_cancel(self, subject: str, data: bytes) -> None:
        try:
            cancel, _ = unpack(data, Cancel)
        except ProtocolError as error:
            logger.warning("ignored on %s: %s", subject, error)
            return
        live = self._live.get(cancel.request)
        if live is None or live.task is None:
            return
        if not cancel.gone:
            live.dropped = True
            live.task.cancel()
            return
        live.gone = True
        self._break_off(live)

    def _break_off(self, live: _Live) -> None:
        """Stop generation for a lost client; the partial answer is recorded."""
        self._abort(live.engine, [choice.engine_id for choice in live.choices])

    def _abort(self, engine: Engine, engine_ids: list[str]) -> None:
        task = asyncio.create_task(engine.abort(engine_ids), name=f"abort {engine_ids[0]}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    # -- gateways ----------------------------------------------------------------------------------------------------

    def _on_present(self, subject: str, data: bytes) -> None:
        try:
            self._gateways.seen(unpack(data, Present)[0].gateway)
        except ProtocolError as error:
            logger.warning("ignored on %s: %s", subject, error)

    async def _watch_gateways(self) -> None:
        """Stop generation for requests whose gateway counts as lost: the gateway's clients are lost with it."""
        while True:
            await asyncio.sleep(SIGN_EVERY_S)
            if not self.bus.connected:  # no heartbeat can arrive
                continue
            gone = self._gateways.look({live.request.gateway for live in self._live.values()})
            for live in list(self._live.values()):
                if live.request.gateway in gone and not (live.gone or live.cut):
                    logger.warning("request %s: its gateway %s is gone", live.request.id, live.request.gateway)
                    live.cut = True
                    self._break_off(live)


def _untrainable(asked: str, *, broken_off: bool, drawn: str) -> str:
    """Return why an answer must not be trained, or ''.

    Args:
        asked: such a reason given by the request of the answer, or ''.
        drawn: such a reason given by its sampling, or ''.
    """
    if asked == CANARY:
        return NOT_COMPARED if broken_off or drawn else CANARY
    if broken_off:
        return "client_disconnected"
    return asked or drawn


def _failure(request: str, error: BaseException) -> Failure:
    if isinstance(error, PenstockError):
        return Failure(request, type(error).__name__, str(error))
    logger.error("inference request %s failed", request, exc_info=error)
    return Failure(request, "PenstockError", f"the request failed inside: {error!r}")
