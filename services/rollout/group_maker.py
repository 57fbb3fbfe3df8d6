"""Generation of the completions or episodes of a ticket, and of their group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.commit_rule import Attempt
from penstock.services.rollout.conversations.episode_state import Ask
from penstock.services.rollout.conversations.player import ConversationPlayer, begun_alike
from penstock.services.rollout.conversations.turn_writer import rows_of
from penstock.services.rollout.conversations.turns import EpisodePlayer, token_of
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.episode import build_group, completion_texts, requests_for, skipped_group
from penstock.services.rollout.observations import ObservationWriter
from penstock.services.rollout.trajectory import Episode, with_episodes
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.rewards.scorers import EnvironmentScorer
from penstock.shared.data.prompts import Prompt
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling
from penstock.shared.protocol.ids import derive_seed, new_attempt
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.partial import recipe_of
from penstock.shared.protocol.trajectory import Group
from penstock.shared.runtime.tasks import together

__all__ = ["GroupMaker", "HeldRows", "room_for"]


class HeldRows:
    """Counts the engine rows that groups hold: one for each completion that has not ended, including waiting ones.

    Args:
        on_free: called when a row may be free.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self.number = 0
        self.num_groups = 0

    @contextmanager
    def group(self, number: int) -> Iterator[Callable[[], None]]:
        """Hold ``number`` rows. Each call of the yielded function frees one; the end of the block frees the rest."""
        left = number

        def free() -> None:
            nonlocal left
            left -= 1
            self.number -= 1
            self._on_free()

        self.number += number
        self.num_groups += 1
        try:
            yield free
        finally:
            self.number -= left
            self.num_groups -= 1
            self._on_free()


def room_for(*, rows: int, completions: int, held: int, num_waiting: int, num_written: int) -> int:
    """Return the number of groups to begin, so that the first completion of each finds a free row.

    Thus free rows are used before the longest completion of another group has ended. Groups being scored or published
    hold no row. No group begins while their number exceeds the number of groups that would fill all rows.

    Args:
        rows: number of rows of the engine.
        completions: number of completions of a group.
        held: rows held by groups in progress.
        num_waiting: groups that have not begun.
        num_written: groups that are being scored or published.
    """
    if num_written > max(1, rows // completions):
        return 0
    free = rows - held - num_waiting * completions
    return max(0, -(-free // completions))


class GroupMaker:
    """Makes the groups of one job on one engine.

    Args:
        on_free: called when a completion has ended, so that another one may begin.
    """

    def __init__(
        self,
        job: str,
        worker: str,
        config: TextJob,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        *,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.held = HeldRows(on_free)
        self._job, self._worker, self._config, self._engine, self._tokenizer = job, worker, config, engine, tokenizer
        self._stop_tokens = frozenset(engine.stop_ids) | frozenset(config.sampling.stop_token_ids)
        self._judged = any(isinstance(scorer, EnvironmentScorer) for scorer in config.reward.scorers)
        self._player = self._open_player()

    async def make(
        self, ticket: Ticket, prompt: Prompt, key: str, ask: Ask, *, attempt: Attempt | None = None
    ) -> Group:
        """Return an unscored group; ``ask`` sends the requests of episodes.

        A group without trajectories was skipped, because its environment began with a prompt that is too long.

        Args:
            key: key of the ticket.
            attempt: has the completions to continue (``begun``), and records open requests and ended completions; no
                request begins once it is discarded or handed over.

        Raises:
            ConfigError: the engine cannot serve such a request.
        """
        asked = requests_for(self._config, ticket)
        start, name = time.perf_counter(), f"{key}@{new_attempt()}"
        episodes: list[Episode] = []
        samples: list[Sample] = []
        with self.held.group(sum(n for _, n in asked)) as free:
            if self._player is None:
                samples = await self._complete(name, prompt, asked, free, attempt or Attempt())
            else:  # an episode keeps its row between two turns, though nothing is decoded for it
                episodes = await self._player.play(name, prompt, self._state_seed(ticket), asked, ask)
        if self._player is None:
            stop = asked[0][0].stop_strings
            texts = completion_texts(samples, self._decode, stop_tokens=self._stop_tokens, stop=stop)
        else:
            prompt = begun_alike(prompt, episodes, max_tokens=self._config.data.prompt.max_tokens)
            if prompt.too_long:
                return skipped_group(
                    job=self._job, draw=ticket.draw, epoch=ticket.epoch, worker=self._worker,
                    reason="prompt_too_long", prompt=prompt,
                )  # fmt: skip
            samples = [episode.sample() for episode in episodes]
            texts = [self._player.scored_text(episode) for episode in episodes]
        group = build_group(
            job=self._job, draw=ticket.draw, epoch=ticket.epoch, worker=self._worker, prompt=prompt,
            samples=samples, texts=texts, temperature=asked[0][0].temperature, seconds=time.perf_counter() - start,
            num_greedy=sum(n for sampling, n in asked if sampling.temperature == 0),
        )  # fmt: skip
        return with_episodes(group, episodes, judged=self._judged) if episodes else group

    def recipe(self, ticket: Ticket, prompt: Prompt) -> str:
        """Return the digest of the requests that ``make`` sends for a ticket."""
        return recipe_of(prompt.token_ids, requests_for(self._config, ticket))

    async def _complete(
        self,
        name: str,
        prompt: Prompt,
        asked: Sequence[tuple[Sampling, int]],
        free: Callable[[], None],
        attempt: Attempt,
    ) -> list[Sample]:
        """Generate the completions with one request each, so that each completion frees its row when it ends; return
        them in order.

        The tokens equal the tokens of one request with n samples, in which sample i has the same seed.
        """

        async def complete(place: int, request: GenRequest) -> Sample:
            sample = request.begun or Sample(token_ids=[], logprobs=[], finish="abort", spans=[])
            if sample.finish == "abort" and not attempt.discarded and not attempt.handed_over:
                [sample] = (await self._engine.generate(request)).samples
            del attempt.requests[request.request_id]
            attempt.ended[place] = sample
            free()
            return sample

        requests = [
            GenRequest(
                request_id=f"{name}.{place}", prompt_ids=prompt.token_ids, sampling=sampling,
                begun=attempt.begun.get(place),
            )
            for place, sampling in enumerate(rows_of(asked))
        ]  # fmt: skip
        attempt.requests.update((request.request_id, place) for place, request in enumerate(requests))
        return await together(complete(place, request) for place, request in enumerate(requests))

    def _state_seed(self, ticket: Ticket) -> int:
        """Return the seed of the environment's state, equal for all episodes of a draw so that they begin in the same
        state."""
        purpose = "environment" if ticket.purpose == "train" else "eval_environment"
        return derive_seed(self._config.seed, purpose, ticket.draw.ordinal, ticket.draw.n)

    def _open_player(self) -> EpisodePlayer | ConversationPlayer | None:
        config = self._config.environment
        if config is None:
            return None
        if isinstance(config, VerifiersConfig):
            return ConversationPlayer(
                self._engine, config, self._tokenizer, self._config.data.prompt, stop_tokens=self._stop_tokens
            )
        end_token = token_of(self._tokenizer.get_vocab(), config.calls.end)
        writer = ObservationWriter(self._tokenizer, config.observations, max_tokens=config.max_observation_tokens)
        return EpisodePlayer(
            self._engine, config, writer, self._decode, end_token=end_token, stop_tokens=self._stop_tokens,
            judged=self._judged,
        )  # fmt: skip

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
