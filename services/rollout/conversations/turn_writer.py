"""Generation of one turn of an episode, from the token ids so far and within its remaining budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from msgspec.structs import replace

from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.episode import completion_texts
from penstock.services.rollout.trajectory import Episode
from penstock.shared.config.environment import EpisodeConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import GenRequest, Sample, Sampling
from penstock.shared.protocol.ids import derive_seed

__all__ = ["TurnWriter", "rows_of"]


class TurnWriter:
    """Generates turns on one engine.

    Args:
        stop_tokens: tokens that may end a turn and are not part of its text.
        also: tokens that end a turn and are part of its text. stop_strings: texts that also end a turn.
    """

    def __init__(
        self,
        engine: Engine,
        config: EpisodeConfig,
        decode: Callable[[list[int]], str],
        *,
        stop_tokens: frozenset[int],
        also: tuple[int, ...] = (),
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self._engine, self._config, self._decode = engine, config, decode
        self._stop_tokens, self._also, self._stop_strings = stop_tokens, also, stop_strings

    async def write(
        self, name: str, prompt_ids: list[int], sampling: Sampling, episode: Episode, clock: TurnClock
    ) -> tuple[Sample, str]:
        """Generate the next turn of ``episode``, append the turn to the episode, and return the turn with its text.

        The clock is paused while the request waits for a row in the engine's batch.
        """
        request = GenRequest(
            request_id=f"{name}/{episode.num_turns}",
            prompt_ids=[*prompt_ids, *episode.token_ids, *episode.observation],
            sampling=self._sampling(sampling, episode), session=name,
            last=episode.num_turns + 1 == self._config.max_turns,
        )  # fmt: skip
        with ExitStack() as queue:
            queue.enter_context(clock.stopped())
            [sample] = (await self._engine.generate(request, on_start=queue.close)).samples
        [text] = completion_texts([sample], self._decode, stop_tokens=self._stop_tokens, stop=sampling.stop_strings)
        episode.say(sample, text)
        return sample, text

    def check_room(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ConfigError if the model's maximum length is too short for the longest episode.

        Checked before the first turn, because an episode that ends for lack of room would look like one cut off by its
        budget.

        Raises:
            ConfigError: the engine's maximum length is too short.
        """
        observations = (self._config.max_turns - 1) * self._config.max_observation_tokens
        if prompt_tokens + max_new_tokens + observations > self._engine.max_length:
            raise ConfigError(
                f"{prompt_tokens} prompt tokens + {max_new_tokens} of the policy + {observations} of observations "
                f"exceed the {self._engine.max_length} that the model takes: shorten the prompt, or lower "
                "max_new_tokens or environment.max_observation_tokens"
            )

    def _sampling(self, sampling: Sampling, episode: Episode) -> Sampling:
        """Return the sampling parameters of one turn: remaining budget, seed, tokens and texts that end a turn."""
        room, turn = sampling.max_new_tokens - episode.num_chosen, episode.num_turns
        seed = sampling.seed if not turn or sampling.seed is None else derive_seed(sampling.seed, "turn", turn)
        return replace(
            sampling, max_new_tokens=min(room, self._config.max_turn_tokens or room), seed=seed,
            stop_strings=(*sampling.stop_strings, *self._stop_strings),
            stop_token_ids=(*sampling.stop_token_ids, *self._also),
        )  # fmt: skip


def rows_of(asked: Sequence[tuple[Sampling, int]]) -> list[Sampling]:
    """Return one ``Sampling`` per completion, each with its own seed. ``asked``: pairs (sampling parameters, number of
    completions)."""
    return [replace(s, seed=None if s.seed is None else s.seed + i) for s, n in asked for i in range(n)]
