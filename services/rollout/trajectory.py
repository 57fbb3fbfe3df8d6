"""An episode in progress: the policy's tokens, and observations between them, which the mask excludes from training.

Token ids are only appended.

Shapes: P = prompt tokens, N = tokens after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.generation import Sample, Span
from penstock.shared.protocol.messages import JUDGEMENTS
from penstock.shared.protocol.trajectory import Group

__all__ = ["Episode", "with_episodes"]


@dataclass(slots=True)
class Episode:
    """One trajectory of several turns.

    Attributes:
        token_ids, logprobs, mask: [N]; log-probs of tokens that the policy did not choose are 0 and meaningless.
        observation: observation that no turn has answered yet; not part of the trajectory.
        num_turns: number of turns of the policy.
        answer: text of the last turn. transcript: text of everything after the prompt.
        error: reason why the trajectory failed; empty if it did not.
        reward: reward from its environment, if requested.
        prompt_ids, prompt_text: prompt that the environment began with; None: the environment brought none.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    observation: list[int] = field(default_factory=list)
    num_turns: int = 0
    answer: str = ""
    transcript: str = ""
    finish: Literal["stop", "length", "abort"] = "abort"
    error: str = ""
    reward: float = 0.0
    prompt_ids: list[int] | None = None
    prompt_text: str = ""
    _observation_text: str = ""
    _spans: list[Span] = field(default_factory=list)
    _experts: NDArray[Any] | None = None

    @property
    def num_chosen(self) -> int:
        """Number of tokens that the policy chose."""
        return sum(self.mask)

    def say(self, sample: Sample, text: str) -> None:
        """Append a turn of the policy. The observation before the turn is labelled with the policy version that read
        it."""
        self.finish = sample.finish
        self.num_turns += 1
        if not sample.token_ids:
            return
        first = sample.spans[0]
        self._append(
            self.observation,
            [0.0] * len(self.observation),
            0,
            [Span(first.version, 0, len(self.observation), first.weights)],
        )
        self._append(sample.token_ids, sample.logprobs, 1, sample.spans)
        self.answer, self.transcript = text, self.transcript + self._observation_text + text
        self.observation, self._observation_text = [], ""
        if sample.experts is not None:  # a token's experts are those of its first computation
            known = self._experts
            rows = sample.experts if known is None else np.concatenate([known, sample.experts[len(known) :]])
            self._experts = rows

    def hear(self, token_ids: list[int], text: str) -> None:
        """Set the observation for the next turn."""
        self.observation, self._observation_text = token_ids, text

    def fail(self, error: str) -> None:
        """Mark the trajectory as failed, so that it is not trained."""
        self.finish, self.error = "abort", error

    def sample(self) -> Sample:
        """Return the whole trajectory in the form of one completion."""
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish=self.finish,
            spans=self._spans,
            experts=self._experts,
        )

    def _append(self, token_ids: list[int], logprobs: list[float], chosen: int, spans: Sequence[Span]) -> None:
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [chosen] * len(token_ids)
        for span in spans:
            if span.end == span.start:
                continue
            begin, end = start + span.start, start + span.end
            if self._spans and (self._spans[-1].version, self._spans[-1].weights) == (span.version, span.weights):
                begin = self._spans.pop().start
            self._spans.append(Span(span.version, begin, end, span.weights))


def with_episodes(group: Group, episodes: Sequence[Episode], *, judged: bool) -> Group:
    """Return the group with the episodes' masks, failures and transcripts.

    If ``judged``, the row also carries the environments' rewards for the scorers.
    """
    meta = {**group.meta, "transcripts": [episode.transcript for episode in episodes]}
    if judged:
        meta["row"] = {**meta["row"], JUDGEMENTS: [episode.reward for episode in episodes]}
    if errors := [episode.error for episode in episodes if episode.error]:
        meta["error"] = errors[0]
    return replace(
        group,
        mask=np.asarray([chosen for episode in episodes for chosen in episode.mask], np.uint8),
        failed=group.failed | np.asarray([bool(episode.error) for episode in episodes], np.bool_),
        meta=meta,
    )
