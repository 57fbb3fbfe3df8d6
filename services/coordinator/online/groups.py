"""Makes the groups of admitted draws, in the form in which workers publish them.

The builders are pure. ``GroupMaker`` makes the groups of off-policy examples: a rollout worker tokenizes their texts
and computes log-probs.

Shapes: N tokens after the first prompt, P prompt tokens, S version spans.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.services.coordinator.online.record_lookup import find_restored_copies
from penstock.services.coordinator.training.ledger import LOGPROBS_DIFFER
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, Interaction
from penstock.shared.protocol.live.reading import ReadReply, ReadRequest
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group
from penstock.shared.transport.bus import Bus

__all__ = ["GroupMaker", "empty_group", "example_group", "group_of", "turn_of"]

logger = logging.getLogger(__name__)

RETRY_S = 0.5
DEADLINE_S = 30.0
WORKER = "online"
"""Worker name of groups that the leader makes."""


def group_of(
    job: str,
    draw: Draw,
    turns: Sequence[Interaction],
    *,
    reward: float,
    epoch: int,
    objective: Objective = "policy",
    temperature: float | None = None,
) -> Group:
    """Build a group of one trajectory: the first prompt, the answers of all turns, and masked context tokens between
    them.

    Context tokens get the first version of the next turn, whose prompt contains them. Their log-probs are 0 and unused.
    The attempt follows from the draw, so every leader makes the same group.

    ``temperature``: training temperature; None: the sampling temperature of the turns, which is the same for all.
    """
    prompt, tokens, mask = list(turns[0].prompt_ids), list[int](), list[int]()
    logprobs, spans, weights = list[float](), list[list[int]](), list[str]()
    for turn in turns:
        context = turn.prompt_ids[len(prompt) + len(tokens) :]
        if context:
            spans.append([0, turn.spans[0].version, len(tokens), len(tokens) + len(context)])
            weights.append(turn.spans[0].weights)
            tokens += context
            logprobs += [0.0] * len(context)
            mask += [0] * len(context)
        start = len(tokens)
        spans += [[0, span.version, start + span.start, start + span.end] for span in turn.spans]
        weights += [span.weights for span in turn.spans]
        tokens += turn.token_ids
        logprobs += turn.logprobs
        mask += [1] * len(turn.token_ids)
    last = turns[-1]
    finish = "length" if last.finish == "length" else "stop"
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch,
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        cu_seqlens=np.array([0, len(tokens)], np.int32),
        logprobs=np.minimum(np.array(logprobs, np.float32), 0.0),
        mask=np.array(mask, np.uint8),
        rewards=np.array([reward], np.float32),
        failed=np.zeros(1, np.bool_),
        finish=np.array([FINISH_REASONS.index(finish)], np.uint8),
        spans=np.array(spans, np.int32).reshape(-1, 4),
        weights=tuple(weights),
        objective=objective,
        temperature=turns[0].sampling.temperature if temperature is None else temperature,
        parts={"feedback": np.array([reward], np.float32)},
        meta={
            "worker": WORKER, "episode": last.episode, "interactions": [turn.id for turn in turns],
            "prompt": turns[0].prompt, "completions": [turn.text for turn in turns[-1:]], **_transcripts(turns),
        },
    )  # fmt: skip


def _transcripts(turns: Sequence[Interaction]) -> dict[str, list[str]]:
    """Return an entry for ``meta`` with all text after the first prompt. Return {} if there is only one turn, if the
    prompts are not stored, or if the last prompt does not begin with the first one."""
    first, last = turns[0].prompt, turns[-1]
    if len(turns) == 1 or not first or not last.prompt.startswith(first):
        return {}
    return {"transcripts": [last.prompt[len(first) :] + last.text]}


def example_group(
    job: str,
    draw: Draw,
    prompt_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
    *,
    objective: Objective,
    reward: float,
    epoch: int,
    logprobs: Sequence[float] | None = None,
    version: int = -1,
    prompt: str = "",
    texts: Sequence[str] = (),
    assumed: bool = False,
    temperature: float = 1.0,
) -> Group:
    """Build the group of answers that were not sampled for this draw: one answer, or a better and a worse answer.

    Args:
        logprobs: log-probs of a single answer; None: zeros, because the loss needs none or they are ``assumed``.
        version: version that sampled the answers; a negative (unknown) one is stored as 0.
        temperature: sampling temperature, or, where that does not matter, the training temperature.
    """
    lengths = [len(answer) for answer in answers]
    tokens = [token for answer in answers for token in answer]
    spans = [[place, max(0, version), 0, length] for place, length in enumerate(lengths)]
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch,
        prompt_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(tokens, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        logprobs=np.minimum(np.array([0.0] * len(tokens) if logprobs is None else logprobs, np.float32), 0.0),
        mask=np.ones(len(tokens), np.uint8),
        rewards=np.full(len(answers), reward, np.float32),
        failed=np.zeros(len(answers), np.bool_),
        finish=np.full(len(answers), FINISH_REASONS.index("stop"), np.uint8),
        spans=np.array(spans, np.int32).reshape(-1, 4),
        objective=objective,
        assumed=assumed,
        temperature=temperature,
        meta={"worker": WORKER, "prompt": prompt, "completions": list(texts) or [""] * len(answers)},
    )  # fmt: skip


def turn_of(
    item: Feedback, read: ReadReply, logprobs: Sequence[float], *, version: int, temperature: float
) -> Interaction:
    """Convert a posted answer to the interaction that the gateway would have recorded; ``read`` has the answer's
    tokens."""
    return Interaction(
        id=item.id, request=item.id, index=0, job=item.job, episode=item.episode, key_id=item.key_id, user=item.user,
        split="train", untrainable="", prompt_ids=read.prompt_ids, token_ids=read.token_ids, logprobs=list(logprobs),
        spans=[Span(version, 0, len(read.token_ids))], finish="stop", template="", body_digest="", text=read.text,
        prompt=read.prompt,
        sampling=Sampling(max_new_tokens=len(read.token_ids), temperature=temperature),
        started=item.received, first_token=item.received, ended=item.received,
    )  # fmt: skip


def empty_group(job: str, draw: Draw, *, epoch: int, reason: str) -> Group:
    """Build a group without completions for a draw that cannot be trained on. When the group arrives, the leader drops
    the draw for ``reason``."""
    empty = np.zeros(0, np.int32)
    return Group(
        job=job, draw=draw, attempt=f"live-{draw}", epoch=epoch, prompt_ids=empty, token_ids=empty,
        cu_seqlens=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32), mask=np.zeros(0, np.uint8),
        rewards=np.zeros(0, np.float32), failed=np.zeros(0, np.bool_), finish=np.zeros(0, np.uint8),
        spans=np.zeros((0, 4), np.int32), meta={"worker": WORKER, "skipped": reason},
    )  # fmt: skip


class Unusable(Exception):  # noqa: N818
    """Raised for an example that cannot be trained on; the text is the reason for dropping the draw."""


class GroupMaker:
    """Makes groups of off-policy examples one after another, in a task of its own, so that no decision waits for a
    worker.

    Args:
        publish: stores a group durably.
    """

    def __init__(
        self, bus: Bus, job: str, config: OnlineJob, *, epoch: int, publish: Callable[[Group], Awaitable[None]]
    ) -> None:
        self._bus, self._job, self._config, self._epoch, self._publish = bus, job, config, epoch, publish
        self._requests: asyncio.Queue[tuple[Draw, Admission, float]] = asyncio.Queue()  # bounded by the draws in flight
        self._pending: set[Draw] = set()

    def request(self, draw: Draw, admission: Admission, temperature: float) -> None:
        """Queue an admitted draw, so that ``run`` makes its group. Safe to repeat.

        A posted answer for the policy loss is trained at the temperature at which it was sampled, any other example at
        ``temperature``.
        """
        if draw not in self._pending:
            self._pending.add(draw)
            self._requests.put_nowait((draw, admission, temperature))

    @property
    def num_pending(self) -> int:
        """Number of requested groups that are not published yet."""
        return len(self._pending)

    async def run(self) -> None:
        """Make requested groups until cancelled."""
        while True:
            draw, admission, temperature = await self._requests.get()
            await self._publish(await self._make(draw, admission, temperature))
            self._pending.discard(draw)

    async def _make(self, draw: Draw, admission: Admission, temperature: float) -> Group:
        while True:
            try:
                return await self._group(draw, admission, temperature)
            except Unusable as unusable:
                return empty_group(self._job, draw, epoch=self._epoch, reason=str(unusable))
            except Unavailable as error:
                logger.info("%s: draw %s waits to be made: %s", self._job, draw, error)
            except PenstockError as error:
                logger.warning("%s: draw %s cannot be made: %s", self._job, draw, error)
                return empty_group(self._job, draw, epoch=self._epoch, reason="not_readable")
            await asyncio.sleep(RETRY_S)

    async def _group(self, draw: Draw, admission: Admission, temperature: float) -> Group:
        items = await self._items(admission)
        item = items[0]
        records = await self._records(admission)
        match item.kind:
            case "preference" if not records:
                return await self._text_preference_group(draw, admission, item.body, temperature)
            case "preference":
                chosen, rejected = records
                return example_group(
                    self._job, draw, chosen.prompt_ids, [chosen.token_ids, rejected.token_ids],
                    objective=admission.objective, reward=admission.reward, epoch=self._epoch,
                    prompt=chosen.prompt, texts=[chosen.text, rejected.text], temperature=temperature,
                )  # fmt: skip
            case "interaction":
                return await self._posted_group(draw, admission, items, temperature)
            case _:
                read = await self._read(ReadRequest(prompt_ids=records[0].prompt_ids, answer=_answer(item)))
                return self._single_answer_group(draw, admission, read, temperature)

    async def _text_preference_group(
        self, draw: Draw, admission: Admission, body: dict[str, Any], temperature: float
    ) -> Group:
        """Make the group of two texts that answer the same prompt, the better one first."""
        prompt_ids, read = body.get("prompt_token_ids") or [], list[ReadReply]()
        for answer in body["answers"]:
            read.append(
                await self._read(
                    ReadRequest(prompt_ids=prompt_ids, messages=body.get("messages") or [], answer=dict(answer))
                )
            )
            self._check_lengths(read[-1])
        chosen, rejected = read
        if chosen.token_ids == rejected.token_ids:
            raise Unusable("same_answer")
        return example_group(
            self._job, draw, chosen.prompt_ids, [chosen.token_ids, rejected.token_ids], objective=admission.objective,
            reward=admission.reward, epoch=self._epoch, temperature=temperature, prompt=chosen.prompt,
            texts=[chosen.text, rejected.text],
        )  # fmt: skip

    async def _posted_group(
        self, draw: Draw, admission: Admission, items: Sequence[Feedback], temperature: float
    ) -> Group:
        """Make the group of one posted answer, or of turns that extend one another, each with its own log-probs."""
        read = [await self._read_posted(admission, item, temperature) for item in items]
        if len(items) == 1:
            return self._single_answer_group(draw, admission, *read[0])
        turns = []
        for item, (reply, sampled, logprobs) in zip(items, read, strict=True):
            self._check_lengths(reply)
            turns.append(turn_of(item, reply, logprobs or [], version=_version(item, admission), temperature=sampled))
        return group_of(
            self._job, draw, turns, reward=admission.reward, epoch=self._epoch, objective=admission.objective
        )  # fmt: skip

    async def _read_posted(
        self, admission: Admission, item: Feedback, temperature: float
    ) -> tuple[ReadReply, float, list[float] | None]:
        """Return ``(tokens, training temperature, log-probs or None)`` of a posted answer."""
        body, version = item.body, _version(item, admission)
        token_ids, posted = body.get("token_ids") or [], body.get("logprobs")
        is_posted = admission.reason == "posted"
        sampling = body.get("sampling") or {}
        sampled = float(sampling.get("temperature", 1.0)) if admission.objective == "policy" else temperature
        audited = is_posted and sampled == 1.0 and self._is_audited(item.id)
        request = ReadRequest(
            prompt_ids=body.get("prompt_token_ids") or [], messages=body.get("messages") or [], token_ids=token_ids,
            answer=None if token_ids else body.get("completion"), score=audited or admission.reason == "rescored",
            version=version, template=str(body.get("tokenizer_sha") or "") if token_ids else "",
        )  # fmt: skip
        read = await self._read(request)
        if admission.reason == "rescored":
            if read.version < version:
                raise Unavailable(f"the worker that was asked does not have version {version} yet")
            if read.version != version:
                raise Unusable("version_not_held")
            return read, sampled, read.logprobs
        known = audited and read.version == version  # other weights prove nothing about the key that posted it
        if known and _gap(posted or [], read.logprobs) > self._config.online.posted.max_logprob_gap:
            raise Unusable(LOGPROBS_DIFFER)
        return read, sampled, posted if is_posted else None

    def _single_answer_group(
        self,
        draw: Draw,
        admission: Admission,
        read: ReadReply,
        temperature: float,
        logprobs: list[float] | None = None,
    ) -> Group:
        self._check_lengths(read)
        return example_group(
            self._job, draw, read.prompt_ids, [read.token_ids], objective=admission.objective, reward=admission.reward,
            epoch=self._epoch, logprobs=logprobs, version=admission.version, assumed=admission.reason == "assumed",
            temperature=temperature, prompt=read.prompt, texts=[read.text],
        )  # fmt: skip

    def _check_lengths(self, read: ReadReply) -> None:
        if len(read.prompt_ids) > self._config.data.prompt.max_tokens:
            raise Unusable("prompt_too_long")
        if len(read.token_ids) > self._config.sampling.max_new_tokens:
            raise Unusable("completion_too_long")

    def _is_audited(self, name: str) -> bool:
        """Return True if the posted interaction ``name`` is in the sample whose log-probs a worker recomputes.

        A hash of the id decides, so every leader agrees. The caller asks only about answers sampled at temperature 1,
        because workers compute log-probs at this temperature.
        """
        return xxhash.xxh32_intdigest(name.encode()) < self._config.online.posted.audit_share * (1 << 32)

    async def _read(self, request: ReadRequest) -> ReadReply:
        data = await self._bus.request(subjects.reading(self._job), pack(request, job=self._job), deadline_s=DEADLINE_S)
        reply = unpack(data, ReadReply)[0]
        if reply.flaw:
            raise Unusable(reply.flaw)
        return reply

    async def _items(self, admission: Admission) -> list[Feedback]:
        """Read the items of feedback that an admission trains on: one item, or the turns of a posted trajectory."""
        seqs = {name: admission.feedback[name] for name in admission.origin[1:]} or admission.feedback
        found = await self._bus.get_whole(subjects.FEEDBACK, sorted(set(seqs.values())))
        items = []
        for name, seq in seqs.items():
            batch = unpack(found[seq].data, FeedbackBatch)[0].items if seq in found else []
            revisions = [item for item in batch if item.id == name]
            revisions = revisions or await find_restored_copies(self._bus, self._job, name, seq)
            if not revisions:
                raise Unusable("feedback_gone")
            items.append(max(revisions, key=lambda item: item.revision))
        return items

    async def _records(self, admission: Admission) -> list[Interaction]:
        seqs = list(admission.context.values())
        found = await self._bus.get_whole(subjects.INTERACTIONS, seqs) if seqs else {}
        if len(found) < len(set(seqs)):
            raise Unusable("interaction_gone")
        return [unpack(found[seq].data, Interaction)[0] for seq in seqs]


def _answer(item: Feedback) -> dict[str, Any]:
    """Return the assistant message of a correction or a demonstration."""
    if item.kind == "correction":
        return dict(item.body["corrected"])
    if isinstance(item.value, str):
        return {"role": "assistant", "content": item.value}
    message = item.body.get("demonstration")
    if isinstance(message, list) and len(message) == 1:
        (message,) = message
    if not isinstance(message, dict):
        raise Unusable("not_readable")
    return message


def _version(item: Feedback, admission: Admission) -> int:
    """Return the policy version that sampled a posted answer.

    A turn of a longer trajectory may name its own version; otherwise the admission has it.
    """
    own = item.body.get("policy_version")
    return int(own) if own is not None and len(admission.origin) > 2 else admission.version


def _gap(posted: list[float], computed: list[float]) -> float:
    """Return the mean absolute difference between posted log-probs and those that a worker computed."""
    return sum(abs(a - b) for a, b in zip(posted, computed, strict=True)) / max(1, len(posted))
