"""Has the completions or episodes of a ticket written, and makes a group of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.conversations.episode_state import Ask
from penstock.services.rollout.conversations.player import ConversationPlayer, begun_alike
from penstock.services.rollout.conversations.turns import EpisodePlayer, token_of
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.episode import build_group, completion_texts, requests_for, skipped_group
from penstock.services.rollout.observations import ObservationWriter
from penstock.services.rollout.trajectory import Episode, with_episodes
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.rewards.scorers import EnvironmentScorer
from penstock.shared.data.prompts import Prompt
from penstock.shared.protocol.generation import GenRequest, GenResult, Sample, Sampling
from penstock.shared.protocol.ids import derive_seed, new_attempt
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.trajectory import Group
from penstock.shared.runtime.tasks import together

__all__ = ["GroupMaker"]


class GroupMaker:
    """Makes the groups of one job on one engine."""

    def __init__(
        self, job: str, worker: str, config: TextJob, engine: Engine, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self._job, self._worker, self._config, self._engine, self._tokenizer = job, worker, config, engine, tokenizer
        self._stop_tokens = frozenset(engine.stop_ids) | frozenset(config.sampling.stop_token_ids)
        self._judged = any(isinstance(scorer, EnvironmentScorer) for scorer in config.reward.scorers)
        self._player = self._open_player()

    async def make(self, ticket: Ticket, prompt: Prompt, key: str, ask: Ask) -> Group:
        """An unscored group; ``ask`` has the requests of episodes carried out. One without trajectories was skipped:
        its environment began with a prompt that is too long.

        Raises:
            ConfigError: the engine cannot serve such a request.
        """
        asked = requests_for(self._config, ticket)
        start, name = time.perf_counter(), f"{key}@{new_attempt()}"
        episodes: list[Episode] = []
        if self._player is None:
            samples = await self._complete(name, prompt, asked)
            stop = asked[0][0].stop_strings
            texts = completion_texts(samples, self._decode, stop_tokens=self._stop_tokens, stop=stop)
        else:
            episodes = await self._player.play(name, prompt, self._state_seed(ticket), asked, ask)
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

    async def _complete(self, name: str, prompt: Prompt, asked: Sequence[tuple[Sampling, int]]) -> list[Sample]:
        requests = [
            GenRequest(request_id=f"{name}.{i}", prompt_ids=prompt.token_ids, sampling=sampling, n=n)
            for i, (sampling, n) in enumerate(asked)
        ]
        results: list[GenResult] = await together(self._engine.generate(request) for request in requests)
        return [sample for result in results for sample in result.samples]

    def _state_seed(self, ticket: Ticket) -> int:
        """The same for all episodes of a draw: they begin alike."""
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
