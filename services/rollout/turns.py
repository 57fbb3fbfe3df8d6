"""Plays episodes: the policy writes a turn, its calls are carried out at once, it reads the results and goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from penstock.services.rollout.calls import Call, find_calls
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.episode import completion_texts
from penstock.services.rollout.observations import ObservationWriter
from penstock.services.rollout.trajectory import Episode
from penstock.services.rollout.turn_clock import TurnClock
from penstock.shared.config.environment import EnvironmentConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import GenRequest, Sampling
from penstock.shared.protocol.ids import derive_seed
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.runtime.tasks import together

__all__ = ["CallTool", "EpisodePlayer", "token_of"]

CallTool = Callable[[TurnClock, str, ToolRequest], Awaitable[ToolReply]]
"""Has a call, named by its id, carried out; waits until somebody answers, and stops the clock while nobody does."""
_TimedCall = Callable[[str, ToolRequest], Awaitable[ToolReply]]


class EpisodePlayer:
    """Plays episodes of one environment on one engine.

    Args:
        end_token: the token that ends a turn because it ends a call; None: its text does, where calls end turns.
        stop_tokens: all tokens that may end a turn.
    """

    def __init__(
        self,
        engine: Engine,
        config: EnvironmentConfig,
        writer: ObservationWriter,
        decode: Callable[[list[int]], str],
        *,
        end_token: int | None,
        stop_tokens: frozenset[int],
    ) -> None:
        self._engine, self._config, self._writer, self._decode = engine, config, writer, decode
        self._end_token, self._stop_tokens = end_token, stop_tokens

    async def play(
        self, name: str, prompt_ids: list[int], asked: Sequence[tuple[Sampling, int]], call: CallTool
    ) -> list[Episode]:
        """One episode for each completion that ``asked`` wants, all at once, in order.

        Raises:
            ConfigError: the engine's model is too short for such an episode, or an observation for the results of a
                turn. The other episodes are over then, too.
        """
        rows = [replace(s, seed=None if s.seed is None else s.seed + i) for s, n in asked for i in range(n)]
        self._check_room(len(prompt_ids), max(sampling.max_new_tokens for sampling in rows))
        self._writer.check(self._config.most_results)
        return await together(
            self._episode(f"{name}.{i}", prompt_ids, sampling, call) for i, sampling in enumerate(rows)
        )

    def scored_text(self, episode: Episode) -> str:
        """What the scorers see of it."""
        return episode.transcript if self._config.scored == "transcript" else episode.answer

    async def _episode(self, name: str, prompt_ids: list[int], sampling: Sampling, call: CallTool) -> Episode:
        episode = Episode()
        limit_s = self._config.turn_timeout_s
        goes_on = True
        while goes_on:
            try:
                async with TurnClock(limit_s) as clock:
                    goes_on = await self._turn(name, prompt_ids, sampling, episode, partial(call, clock))
            except TimeoutError:
                episode.fail(f"a turn took longer than environment.turn_timeout_s ({limit_s:g} s)")
                break
        return episode

    async def _turn(
        self, name: str, prompt_ids: list[int], sampling: Sampling, episode: Episode, call: _TimedCall
    ) -> bool:
        """One turn and its calls; whether another turn follows."""
        tokens = [*prompt_ids, *episode.token_ids, *episode.told]
        request = GenRequest(
            request_id=f"{name}/{episode.num_turns}", prompt_ids=tokens, sampling=self._sampling(sampling, episode),
            session=name, last=episode.num_turns + 1 == self._config.max_turns,
        )  # fmt: skip
        [sample] = (await self._engine.generate(request)).samples
        [text] = completion_texts(
            [sample], self._decode, stop_tokens=self._stop_tokens - {self._end_token}, stop=sampling.stop_strings
        )
        episode.say(sample, text)
        calls = find_calls(text, self._config.calls, self._config.tools)
        if sample.finish != "stop" or not calls:
            return False
        if episode.num_turns == self._config.max_turns or episode.num_chosen >= sampling.max_new_tokens:
            episode.finish = "length"
            return False
        results = await self._results(f"{name}/{episode.num_turns}", calls, call)
        if isinstance(results, ToolReply):
            episode.fail(results.text)
            return False
        told = self._writer.write(results)
        episode.hear(told, self._decode(told))
        return True

    async def _results(self, name: str, calls: Sequence[Call], call: _TimedCall) -> list[str] | ToolReply:
        """What the policy is told, in the order of its calls; or the failure that ends its trajectory."""
        most = self._config.calls.max_calls
        if len(calls) > most:
            return [_told("error", f"{len(calls)} calls in one turn, at most {most} are carried out")]
        replies = await together(self._carry_out(f"{name}/{i}", one, call) for i, one in enumerate(calls))
        failed = [reply for reply in replies if reply.status == "failed"]
        if failed and self._config.on_tool_failure == "fail":
            return failed[0]
        return [_told(reply.status, reply.text) for reply in replies]

    async def _carry_out(self, name: str, one: Call, call: _TimedCall) -> ToolReply:
        if one.problem:
            return ToolReply(status="error", text=one.problem)
        return await call(name, ToolRequest(name=one.name, arguments=one.arguments))

    def _sampling(self, sampling: Sampling, episode: Episode) -> Sampling:
        """For one turn: what is left of the token budget, a seed of its own, the end of a call where that ends it."""
        room, turn = sampling.max_new_tokens - episode.num_chosen, episode.num_turns
        seed = sampling.seed if not turn or sampling.seed is None else derive_seed(sampling.seed, "turn", turn)
        strings, tokens = sampling.stop_strings, sampling.stop_token_ids
        if not self._config.calls.parallel:
            if self._end_token is None:
                strings = (*strings, self._config.calls.end)
            else:
                tokens = (*tokens, self._end_token)
        return replace(
            sampling, max_new_tokens=min(room, self._config.max_turn_tokens or room), seed=seed,
            stop_strings=strings, stop_token_ids=tokens,
        )  # fmt: skip

    def _check_room(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Before the first turn: an episode that ends for want of room in the model would look like one cut off."""
        observations = (self._config.max_turns - 1) * self._config.max_observation_tokens
        if prompt_tokens + max_new_tokens + observations > self._engine.max_length:
            raise ConfigError(
                f"{prompt_tokens} prompt tokens + {max_new_tokens} of the policy + {observations} of observations "
                f"exceed the {self._engine.max_length} that the model takes: shorten the prompt, or lower "
                "max_new_tokens or environment.max_observation_tokens"
            )


def token_of(vocabulary: Mapping[str, int], marker: str) -> int | None:
    """The token that alone writes ``marker``; None where another one may, too, or none does."""
    holders = [token for token in vocabulary if marker in token]
    return vocabulary[marker] if holders == [marker] else None


def _told(status: str, text: str) -> str:
    return text if status == "ok" else f"error: {text}"
