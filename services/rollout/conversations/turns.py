"""Episodes with tools: the policy generates a turn, env workers execute its calls, results precede the next turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from penstock.services.rollout.conversations.episode_state import Ask, StateKeeper, with_state
from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.services.rollout.conversations.turn_writer import TurnWriter, rows_of
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.episode import plain
from penstock.services.rollout.observations import ObservationWriter
from penstock.services.rollout.trajectory import Episode
from penstock.shared.config.environment import CallFormat, EnvironmentConfig
from penstock.shared.config.tools import ToolConfig
from penstock.shared.data.prompts import Prompt
from penstock.shared.protocol.generation import Sampling
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.runtime.tasks import together

__all__ = ["Call", "EpisodePlayer", "find_calls", "token_of"]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call, or the reason why the text between the markers is not a call."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_calls(text: str, form: CallFormat, tools: Sequence[ToolConfig]) -> list[Call]:
    """Return all complete calls in order. A call without its end marker is ignored."""
    calls, place = list[Call](), 0
    while (start := text.find(form.begin, place)) >= 0:
        body = start + len(form.begin)
        end = text.find(form.end, body)
        if end < 0:
            break
        calls.append(_parsed(text[body:end]) if form.body == "json" else _only(text[body:end], tools[0]))
        place = end + len(form.end)
    return calls


def _only(body: str, tool: ToolConfig) -> Call:
    """Return a call of ``tool`` with ``body`` as the only argument.

    The argument is the first required one of the tool, or its first one if the tool requires none.
    """
    schema = tool.parameters
    name = next(iter(schema.get("required") or schema["properties"]))
    return Call(tool.name, {name: body})


def _parsed(body: str) -> Call:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem="a call is an object with 'name' and 'arguments'")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(problem="'arguments' must be an object")
    try:
        msgspec.msgpack.encode([call["name"], arguments])
    except (ValueError, OverflowError, RecursionError) as error:  # half of a surrogate pair, a number of 100 digits
        return Call(problem=f"the call cannot be sent: {error}")
    return Call(call["name"], arguments)


class EpisodePlayer:
    """Plays episodes of one environment on one engine.

    Args:
        end_token: token that is the end marker of a call; None: only the marker's text shows the end. Unless a turn may
            have parallel calls, the end of a call also ends the turn.
        stop_tokens: all tokens that may end a turn.
        judged: True to ask the tool objects for the reward of an episode.
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
        judged: bool = False,
    ) -> None:
        self._config, self._observations, self._decode, self._judged = config, writer, decode, judged
        ends = not config.calls.parallel
        self._writer = TurnWriter(
            engine, config, decode, stop_tokens=stop_tokens - {end_token},
            also=(end_token,) if ends and end_token is not None else (),
            stop_strings=(config.calls.end,) if ends and end_token is None else (),
        )  # fmt: skip

    async def play(
        self, name: str, prompt: Prompt, seed: int, asked: Sequence[tuple[Sampling, int]], ask: Ask
    ) -> list[Episode]:
        """Play one episode per requested completion, concurrently; return them in order. ``seed``: seed of all tool
        states.

        Raises:
            ConfigError: the engine's maximum length is too short for such an episode, or ``max_observation_tokens`` is
                too small for the results of a turn. Episodes in progress are cancelled.
        """
        rows = rows_of(asked)
        self._writer.check_room(len(prompt.token_ids), max(sampling.max_new_tokens for sampling in rows))
        self._observations.check(self._config.most_results)
        return await together(
            with_state(
                f"{name}.{i}", seed=seed, row=plain(prompt.row), ask=ask, restarts=self._config.restarts,
                play=partial(self._episode, prompt.token_ids, sampling, ask),
            )
            for i, sampling in enumerate(rows)
        )  # fmt: skip

    def scored_text(self, episode: Episode) -> str:
        """Return the text that scorers read: the transcript of the episode, or the text of its last turn."""
        return episode.transcript if self._config.scored == "transcript" else episode.answer

    async def _episode(self, prompt_ids: list[int], sampling: Sampling, ask: Ask, keeper: StateKeeper) -> Episode:
        episode, goes_on = Episode(), True
        try:
            while goes_on:
                async with TurnClock(self._config.turn_timeout_s) as clock:
                    goes_on = await self._turn(prompt_ids, sampling, episode, _Calls(clock, ask, keeper))
            if self._judged and episode.finish != "abort":
                async with TurnClock(self._config.turn_timeout_s) as clock:
                    await self._judge(episode, clock, keeper)
        except TimeoutError:
            episode.fail(f"a turn took longer than environment.turn_timeout_s ({self._config.turn_timeout_s:g} s)")
        return episode

    async def _turn(self, prompt_ids: list[int], sampling: Sampling, episode: Episode, calling: _Calls) -> bool:
        """Generate one turn and execute its calls; return whether another turn follows."""
        sample, text = await self._writer.write(calling.episode, prompt_ids, sampling, episode, calling.clock)
        calls = find_calls(text, self._config.calls, self._config.tools)
        if sample.finish != "stop" or not calls:
            return False
        if episode.num_turns == self._config.max_turns or episode.num_chosen >= sampling.max_new_tokens:
            episode.finish = "length"
            return False
        results = await self._results(f"{calling.episode}/{episode.num_turns}", calls, calling)
        if isinstance(results, ToolReply):
            episode.fail(results.text)
            return False
        observation = self._observations.write(results)
        episode.hear(observation, self._decode(observation))
        return True

    async def _results(self, name: str, calls: Sequence[Call], calling: _Calls) -> list[str] | ToolReply:
        """Return the results of the calls in order, or the failure that ends the trajectory."""
        most = self._config.calls.max_calls
        if len(calls) > most:
            return [_result_text("error", f"{len(calls)} calls in one turn, at most {most} are carried out")]
        stateful = self._config.stateful
        replies = await together(
            calling.carry_out(f"{name}/{i}", one, stateful=one.name in stateful) for i, one in enumerate(calls)
        )
        failed = [reply for reply in replies if reply.status == "failed"]
        ends = failed if self._config.on_tool_failure == "fail" else [reply for reply in failed if reply.gone]
        if ends:
            return ends[0]
        return [_result_text(reply.status, reply.text) for reply in replies]

    @staticmethod
    async def _judge(episode: Episode, clock: TurnClock, keeper: StateKeeper) -> None:
        reply = await keeper.ask(clock, ToolRequest(purpose="reward", arguments={"answer": episode.answer}))
        if reply.status == "ok":
            episode.reward = float(reply.text)
        else:
            episode.fail(reply.text)


class _Calls:
    """Executes the calls of one turn."""

    def __init__(self, clock: TurnClock, ask: Ask, keeper: StateKeeper) -> None:
        self.clock, self._ask, self._keeper = clock, ask, keeper

    @property
    def episode(self) -> str:
        """Name of the episode."""
        return self._keeper.episode

    async def carry_out(self, name: str, one: Call, *, stateful: bool) -> ToolReply:
        """Execute one call. Calls that use the state of the episode are executed in call order."""
        if one.problem:
            return ToolReply(status="error", text=one.problem)
        request = ToolRequest(name=one.name, arguments=one.arguments)
        return await (self._keeper.ask(self.clock, request) if stateful else self._ask(self.clock, name, request))


def token_of(vocabulary: Mapping[str, int], marker: str) -> int | None:
    """Return the id of the token whose text is ``marker``. Return None if there is no such token, or if the text of
    other tokens contains ``marker``, too."""
    holders = [token for token in vocabulary if marker in token]
    return vocabulary[marker] if holders == [marker] else None


def _result_text(status: str, text: str) -> str:
    return text if status == "ok" else f"error: {text}"
