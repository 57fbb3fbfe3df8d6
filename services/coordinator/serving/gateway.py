"""Gateway between HTTP clients and rollout workers: routes requests and tokens, and recovers from lost workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from penstock.services.coordinator.feedback.privacy import objection
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.serving.answer import Answer, Ask
from penstock.services.coordinator.serving.episodes import Episodes
from penstock.services.coordinator.serving.handover import Notes
from penstock.services.coordinator.serving.models import ModelTable, Served
from penstock.services.coordinator.serving.replicas import Replicas
from penstock.services.coordinator.serving.retries import Retries, key_of
from penstock.services.coordinator.serving.threads import KEEP_S, Threads
from penstock.services.coordinator.training.canary import is_in_canary
from penstock.shared.errors import (
    Gone,
    NotFound,
    OutOfReach,
    PenstockError,
    ProtocolError,
    RateLimited,
    RetryLater,
    Unavailable,
    class_named,
)
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.live.episode import EpisodeRecord
from penstock.shared.protocol.live.inference import SIGN_EVERY_S, Cancel, Chunks, Failure, InferenceReply, Present
from penstock.shared.protocol.live.interaction import CANARY, USER_TAG, Interaction, bare_id, named_tags, new_marked_id
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.connection import NoResponders

__all__ = ["MAX_IN_FLIGHT", "Gateway"]

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2048
"""Maximum number of requests of one model in this process; further ones are refused. A key is refused once it has as
many requests as there are free slots: one key alone gets half of the slots, two keys a third each."""
SILENT_S = 4 * SIGN_EVERY_S
"""Seconds of silence after which a worker counts as lost; other workers then continue its requests."""
REPLY_S = 10.0
RETRY_S = 0.1
MAX_RECOVERIES = 5
"""Maximum number of recoveries of a request; a request that is lost more often probably crashes its workers."""


class Gateway:
    """Registry of models and active answers. ``run`` it until cancelled.

    Args:
        pseudonym: returns the pseudonym of a user for records.
        consent_of: returns the consent to training of the user of a pseudonym; None if not stated.
        share: see ``Episodes``.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        *,
        pseudonym: Callable[[str], str],
        consent_of: Callable[[str], bool | None],
        share: float = 1.0,
    ) -> None:
        self.id = f"{worker_id}.{secrets.token_hex(4)}"
        self._bus, self._pseudonym, self._consent_of = bus, pseudonym, consent_of
        self._table, self._threads, self._notes = ModelTable(bus), Threads(bus), Notes(bus, self.id)
        self.episodes, self.retries = Episodes(bus, share), Retries(self.give_up)
        self._replicas = Replicas(bus, self.id, self._notes, self.retries, self)
        self._answers: dict[str, Answer] = {}
        self._in_flight: Counter[str] = Counter()
        self._of_key: Counter[tuple[str, str]] = Counter()
        self._heard: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow the job records and receive the workers' messages, until cancelled."""
        async with (
            await self._bus.subscribe(subjects.inference_chunks(self.id), self._on_chunks),
            await self._bus.serve(subjects.inference_claims(self.id), self._replicas.hand_over),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._table.run())
            tasks.create_task(self._watch_workers())
            tasks.create_task(self.episodes.run())

    # -- requests ----------------------------------------------------------------------------------------------------

    def pseudonym(self, user: str) -> str:
        """Return a user's pseudonym for records; '' for no user. Raises Unavailable until pseudonyms are loaded."""
        return self._pseudonym(user)

    def models(self) -> list[Served]:
        """Return all models. Raises Unavailable while the job records are not loaded."""
        if not self._table.current:
            raise Unavailable("the jobs are not read yet; retry in a moment")
        return self._table.rows()

    def find(self, model: str) -> Served:
        """Return a model by its name, or by the id of its job. Raises NotFound, Unavailable."""
        return self._table.find(model)

    async def open(self, ask: Ask) -> Answer:
        """Dispatch a request to a rollout worker, and return its answer; a retry gets its earlier attempt's answer.

        Call ``leave`` afterwards.

        Raises:
            ConfigError: the prompt cannot be rendered, or is too long.
            RateLimited: all workers are full.
            RetryLater: no worker accepts the request.
            Gone: the episode has ended.
            OutOfReach: the episode belongs to another key.
        """
        key = key_of(ask.served.job, ask.draft.key_id, ask.episode, ask.draft.body_digest)
        if ask.retries:
            earlier = await self.retries.earlier(key)
            earlier = earlier or await self._replicas.earlier(key, lambda: self._prepared(ask))
            if earlier is not None:
                return earlier
        if self._in_flight[ask.served.job] + self._of_key[ask.served.job, ask.draft.key_id] >= MAX_IN_FLIGHT:
            raise _full(ask.served)
        answer = await self._prepared(ask)
        if ask.retries is None:
            return await self._dispatched(answer)
        answer.key = key
        self.retries.read(key)
        try:
            return await self._dispatched(answer)
        except BaseException:
            self.retries.left(key)
            self._notes.drop(key, answer.id)
            raise

    def leave(self, answer: Answer, *, begun: bool) -> None:
        """Release an answer when its reader has finished or disconnected; ``begun``: the reader received part of the
        answer."""
        if answer.key:
            self.retries.left(answer.key)
        if not begun and answer.key and answer.error is None:
            self.retries.keep(answer)
        elif answer.done:
            self._notes.drop(answer.key, answer.id)
        else:
            self.give_up(answer)

    async def interaction(self, job: str, id: str) -> Interaction | None:
        """Return the record of an interaction, or None. Raises Unavailable."""
        message = await self._bus.last(subjects.INTERACTIONS, subjects.interaction(job, id))
        if message is None:
            return None
        try:
            return await whole_of(self._bus, subjects.INTERACTIONS, message, Interaction)
        except (ProtocolError, NotFound):  # overwritten when the user's data was deleted
            return None

    async def remember(self, answer: Answer, message: dict[str, object]) -> None:
        """Store the message that a client received, so that a chat that continues this message belongs to the same
        episode."""
        if answer.conversation:
            request = answer.request
            await self._threads.remember(answer.conversation, request.messages, message, request.episode)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _prepared(self, ask: Ask) -> Answer:
        """Complete the client's request as workers will receive it, and return an empty answer (without chunks) for it.

        Raises:
            Gone: the episode has ended.
            OutOfReach: the episode belongs to another key.
        """
        record = await self.episodes.opened(ask.served, ask.episode)
        if record is None and ask.only_opened:  # its record, and so its split, are unknown
            raise Gone("episode_over", f"episode '{ask.episode}' is not known any more: open another one")
        job, draft = ask.served.job, ask.draft
        if record is not None and record.key_id != draft.key_id and not ask.any_owner:
            raise OutOfReach("not_found", f"no running job has an episode '{ask.episode}'")
        tags = _tags(record)
        if record is not None and not record.user:  # opened by an earlier version, which stored the plain name
            tags = named_tags(tags, self._pseudonym)
        user = self._pseudonym(ask.user) or (record.user if record is not None else "") or tags.get(USER_TAG, "")
        objects = objection(self._consent_of(user), ask.served.consent)
        conversation, found_s = _conversation(ask, user, objects)
        episode = ask.episode
        if conversation:
            episode = await self._threads.find(conversation, draft.messages, found_s or KEEP_S)
        untrainable = draft.untrainable or objects
        episode = episode or f"ep_{new_marked_id(job)}"
        canary = _canary_of(ask.served, bare_id(episode) or f"{draft.key_id} {episode}")
        sampling = draft.sampling
        if sampling.temperature is None or ask.served.forced_sampling:
            # Resolved here: the job's value may change before another worker continues the answer.
            sampling = replace(sampling, temperature=ask.served.temperature)
        request = replace(
            draft, ids=self._new_ids(job, ask.num_prompts * draft.n), gateway=self.id, user=user,
            episode=episode, alone=not ask.episode and not (conversation and found_s),
            untrainable=untrainable or ("" if canary < 0 else CANARY),
            split="val" if record is not None and record.split == "val" else draft.split,
            sampling=sampling, tags=tags | named_tags(draft.tags, self._pseudonym), canary=canary,
        )  # fmt: skip
        answer = Answer(ask.served, request)
        answer.conversation = conversation
        return answer

    def _new_ids(self, job: str, number: int) -> list[str]:
        return [new_marked_id(job) for _ in range(number)]

    async def _dispatched(self, answer: Answer) -> Answer:
        """Dispatch the request and return the answer once a worker has accepted it.

        Raises:
            RateLimited: all workers are full until the end of the job's ``hold_s``.
            RetryLater: no worker accepts it within ``hold_s``.
            PenstockError: the request cannot be served.
        """
        served, clock = answer.served, asyncio.get_running_loop().time
        end = clock() + served.hold_s
        subject, full = subjects.inference(served.job), False
        while True:
            if answer.given_up:
                raise Unavailable("nobody waits for the answer")
            self.enter(answer)
            try:
                await self._notes.write(answer)
                data = await self._bus.request(subject, pack(answer.request, job=served.job), deadline_s=REPLY_S)
                reply, _ = unpack(data, InferenceReply)
            except Unavailable as error:
                self.withdraw(answer)
                why, full = error, False
                if not (answer.prompt_ids or isinstance(error, NoResponders)):
                    # A worker may have accepted it nevertheless; new ids make its answer an orphan.
                    self._notes.drop(answer.key, answer.id)
                    answer.request = replace(answer.request, ids=self._new_ids(served.job, len(answer.request.ids)))
            except BaseException:
                self.withdraw(answer)
                raise
            else:
                if reply.accepted:
                    self.accepted(answer, reply)
                    if answer.given_up:
                        self._send_cancel(reply.worker, Cancel(request=answer.id, gone=True))
                    return answer
                self.withdraw(answer)
                why, full = Unavailable("all rollout workers are full"), True
            if clock() + RETRY_S > end:
                raise _full(served) if full else _no_worker(served, why)
            with contextlib.suppress(Unavailable):
                self._table.find(served.job)
            await asyncio.sleep(RETRY_S)

    def accepted(self, answer: Answer, reply: InferenceReply) -> None:
        """Record in the answer which worker writes it. The worker may be another gateway, which relays the answer."""
        self._heard[reply.worker] = asyncio.get_running_loop().time()
        answer.accepted(reply)

    def enter(self, answer: Answer) -> None:
        """Accept chunks of the answer from now on."""
        if answer.id not in self._answers:
            self._answers[answer.id] = answer
            self._in_flight[answer.served.job] += 1
            self._of_key[answer.served.job, answer.request.key_id] += 1

    def withdraw(self, answer: Answer) -> None:
        """Accept no more chunks of the answer."""
        if self._answers.get(answer.id) is answer:
            del self._answers[answer.id]
            self._in_flight[answer.served.job] -= 1
            key = answer.served.job, answer.request.key_id
            self._of_key[key] -= 1
            if not self._of_key[key]:
                del self._of_key[key]

    def give_up(self, answer: Answer) -> None:
        """Cancel the answer at its worker because the client is gone; the worker records the partial answer."""
        self.retries.unkeep(answer)
        self._notes.drop(answer.key, answer.id)
        answer.given_up = True
        if not answer.done and answer.worker:
            self._send_cancel(answer.worker, Cancel(request=answer.id, gone=True))

    def _send_cancel(self, worker: str, cancel: Cancel) -> None:
        async def send() -> None:
            with contextlib.suppress(PenstockError):
                await self._bus.notify(subjects.inference_worker(worker), pack(cancel))

        task = asyncio.create_task(send(), name=f"cancel {cancel.request}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _on_chunks(self, subject: str, data: bytes) -> None:
        try:
            message, _ = unpack(data, Chunks)
        except ProtocolError as error:
            logger.warning("ignored on %s: %s", subject, error)
            return
        self._heard[message.worker] = asyncio.get_running_loop().time()
        for chunk in message.chunks:
            answer = self._answers.get(chunk.request)
            if answer is None or answer.worker not in ("", message.worker):
                continue
            left = chunk.finish == "client_disconnected" and not answer.given_up  # the worker missed our heartbeats
            if left or not answer.feed(chunk):
                self.recover(answer)
            elif answer.done:
                self.withdraw(answer)
        for failure in message.failures:
            self._on_failure(message.worker, failure)
        if message.in_hand is not None:
            self._compare(message.worker, set(message.in_hand))

    def _on_failure(self, worker: str, failure: Failure) -> None:
        answer = self._answers.get(failure.request)
        if answer is None or answer.worker not in ("", worker):
            return
        kind = class_named(failure.error)
        if issubclass(kind, Unavailable):
            self.recover(answer)
        else:
            self._fail(answer, kind(failure.text))

    def _compare(self, worker: str, in_hand: set[str]) -> None:
        """Compare the requests that a worker reports with those that it should serve: cancel unknown requests, and
        recover the answers of missing ones."""
        for unknown in in_hand - self._answers.keys():
            self._send_cancel(worker, Cancel(request=unknown, gone=False))
        for answer in list(self._answers.values()):
            if answer.worker == worker and answer.id not in in_hand:
                self.recover(answer)

    async def _watch_workers(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(SIGN_EVERY_S / 2)
            for answer in list(self._answers.values()):
                if answer.worker and clock() - self._heard.get(answer.worker, 0.0) > SILENT_S:
                    self.recover(answer)
            busy = {answer.worker for answer in self._answers.values()}
            self._heard = {worker: heard for worker, heard in self._heard.items() if worker in busy}
            for worker in self._heard:
                with contextlib.suppress(Unavailable):
                    await self._bus.notify(subjects.inference_present(worker), pack(Present(gateway=self.id)))

    def recover(self, answer: Answer) -> None:
        """Continue an answer whose worker or chunks were lost, in the task ``answer.recovering``."""
        if answer.recovering is None:
            answer.recovering = asyncio.create_task(self._recovered(answer), name=f"recover {answer.id}")

    async def _recovered(self, answer: Answer) -> None:
        """Complete choices from their records, and dispatch the rest to another worker."""
        logger.warning("request %s lost its worker %s", answer.id, answer.worker)
        self._send_cancel(answer.worker, Cancel(request=answer.id, gone=False))
        answer.worker = ""
        try:
            for index in answer.unfinished:
                record = await self.interaction(answer.served.job, answer.request.ids[index])
                if record is not None and record.finish != "client_disconnected":
                    answer.finish_from(index, record)
            self.withdraw(answer)
            if answer.done:
                return
            if answer.given_up:
                raise Unavailable("nobody waits for the answer")
            answer.recoveries += 1
            if answer.recoveries > MAX_RECOVERIES:
                raise Unavailable(f"{answer.recoveries} rollout workers in turn lost this request")
            answer.request = replace(answer.request, begun=answer.progress(), wanted=answer.unfinished)
            await self._dispatched(answer)
        except PenstockError as error:
            self._fail(answer, error)
        finally:
            answer.recovering = None

    def _fail(self, answer: Answer, error: PenstockError) -> None:
        self.withdraw(answer)
        answer.fail(error)


def _tags(record: EpisodeRecord | None) -> dict[str, str]:
    if record is None:
        return {}
    return record.tags if record.group_id is None else {**record.tags, "group_id": record.group_id}


def _conversation(ask: Ask, user: str, objects: str) -> tuple[tuple[str, ...], float]:
    """Return ``(owner of the chat, maximum age in seconds of an answer that the chat may continue)``; ((), 0) if the
    request names an episode or is no chat.

    The age is 0 if the job does not credit such chats as episodes (see ``Served.found_episodes_s``). If the job does,
    the owner is empty for requests that are not recorded or that the job must not train on.
    """
    draft, found_s = ask.draft, ask.served.found_episodes_s
    owner = (ask.served.job, draft.key_id, user)
    if ask.episode or draft.kind != "chat":
        return (), 0.0
    if not found_s:
        return owner, 0.0
    return ((*owner, "found"), found_s) if draft.store and not objects else ((), found_s)


def _canary_of(served: Served, conversation: str) -> int:
    """Return the canary version if it serves this conversation, else -1."""
    if served.canary is None:
        return -1
    version, share = served.canary
    return version if is_in_canary(served.job, version, share, conversation) else -1


def _full(served: Served) -> RateLimited:
    text = f"model '{served.name}' has as many requests as it can take; come back in a moment"
    return RateLimited("capacity", text, retry_after_s=0.5)


def _no_worker(served: Served, why: Unavailable) -> RetryLater:
    text = f"no rollout worker serves model '{served.name}' within {served.hold_s:g} s: {why}"
    return RetryLater("no_worker", text)
