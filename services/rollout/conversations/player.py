"""Episodes led by the environment, which sends messages to the policy and ends the episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.conversations.episode_state import Ask, StateKeeper, with_state
from penstock.services.rollout.conversations.rendering import Renderer, content_text
from penstock.services.rollout.conversations.text_stream import ToolCalls
from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.services.rollout.conversations.turn_writer import TurnWriter, rows_of
from penstock.services.rollout.engines import Engine
from penstock.services.rollout.observations import without
from penstock.services.rollout.trajectory import Episode
from penstock.shared.config.data import PromptConfig
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.data.prompts import Prompt
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import Sample, Sampling
from penstock.shared.protocol.tools import Purpose, Step, ToolRequest
from penstock.shared.runtime.tasks import together

__all__ = ["Conversation", "ConversationPlayer", "begun_alike"]


_MARK = "what-the-policy-wrote"
"""Placeholder that stands for a turn of the policy when the messages after this turn are rendered."""

Message = dict[str, Any]


class Conversation:
    """Renders one growing conversation with the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, renderer: Renderer) -> None:
        self._special, self._renderer = list(tokenizer.all_special_tokens), renderer
        self._messages: list[Message] = []
        self._tools: list[Message] = []

    def begin(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, list[int]]:
        """Start the conversation; return prompt text and token ids. Raises ConfigError if the template rejects it."""
        self._messages, self._tools = list(messages), list(tools)
        text = self._renderer.text(self._messages, tools=self._tools)
        return text, self._renderer.encode(text)

    def go_on(self, turn: Message, messages: Sequence[Message], ended_with: str) -> list[int]:
        """Return the token ids of ``messages``, which follow the policy's ``turn``, up to the start of its next turn.

        The policy's own turn is not rendered, because its ids are known. Special tokens are removed from ``messages``.

        Args:
            ended_with: text of the stop token that ended the turn, removed from the rendered text; empty if none did.

        Raises:
            ConfigError: the template rejects the messages, or omits the policy's turn.
        """
        new = [{**message, "content": self._plain(message)} for message in messages]
        marked = {"role": "assistant", "content": _MARK}
        text = self._renderer.text([*self._messages, marked, *new], tools=self._tools)
        _, found, after = text.rpartition(_MARK)
        if not found:
            raise ConfigError("the chat template leaves out what the policy wrote in an earlier turn")
        self._messages += [turn, *new]
        return self._renderer.encode(after.removeprefix(ended_with))

    def _plain(self, message: Message) -> str:
        return without(content_text(message.get("content")), self._special)


class ConversationPlayer:
    """Plays episodes of one environment on one engine."""

    def __init__(
        self,
        engine: Engine,
        config: VerifiersConfig,
        tokenizer: PreTrainedTokenizerFast,
        prompt: PromptConfig,
        *,
        stop_tokens: frozenset[int],
    ) -> None:
        self._config, self._tokenizer, self._stop_tokens = config, tokenizer, stop_tokens
        self._max_prompt = prompt.max_tokens
        self._renderer = Renderer(tokenizer, prompt.chat_template_args)
        self._writer = TurnWriter(engine, config, self._decode, stop_tokens=stop_tokens)

    async def play(
        self, name: str, prompt: Prompt, seed: int, asked: Sequence[tuple[Sampling, int]], ask: Ask
    ) -> list[Episode]:
        """Play one episode of the prompt's task for each requested completion, concurrently, and return them in order.

        Raises:
            ConfigError: the engine's maximum length is too short for such an episode.
        """
        rows = rows_of(asked)
        self._writer.check_room(self._max_prompt, max(sampling.max_new_tokens for sampling in rows))
        return await together(
            with_state(
                f"{name}.{i}", seed=seed, row={}, ask=ask, restarts=self._config.restarts,
                play=partial(self._episode, prompt.row["task"], sampling),
            )
            for i, sampling in enumerate(rows)
        )  # fmt: skip

    def scored_text(self, episode: Episode) -> str:
        """Return the text for all scorers but the environment: the last turn of the policy."""
        return episode.answer

    async def _episode(self, task: int, sampling: Sampling, keeper: StateKeeper) -> Episode:
        play = _Play(Episode(), Conversation(self._tokenizer, self._renderer), keeper)
        try:
            async with TurnClock(self._config.turn_timeout_s) as clock:
                step = await play.ask(clock, "begin", task=task)
            while step.messages is not None and not play.episode.error:
                async with TurnClock(self._config.turn_timeout_s) as clock:
                    step = await self._turn(play, step, sampling, clock)
        except TimeoutError:
            play.episode.fail(f"a turn took longer than environment.turn_timeout_s ({self._config.turn_timeout_s:g} s)")
            return play.episode
        except (ConfigError, msgspec.DecodeError) as error:
            play.episode.fail(str(error))
            return play.episode
        play.episode.reward = step.reward
        if step.error:
            play.episode.fail(step.error)
        return play.episode

    async def _turn(self, play: _Play, step: Step, sampling: Sampling, clock: TurnClock) -> Step:
        """Generate one turn and return the environment's next step."""
        assert step.messages is not None
        episode = play.episode
        if not episode.num_turns:
            episode.prompt_text, episode.prompt_ids = play.conversation.begin(step.messages, step.tools)
            if len(episode.prompt_ids) > self._max_prompt:
                return Step(error=f"the prompt is longer than data.prompt.max_tokens ({self._max_prompt})")
        else:
            observation = play.conversation.go_on(play.said, step.messages, play.ended_with)
            if self._is_over(episode, observation, sampling):
                episode.finish = "length"
                return await play.ask(clock, "stop")
            episode.hear(observation, self._decode(observation))
        name = play.keeper.episode
        sample, text = await self._writer.write(name, episode.prompt_ids or [], sampling, episode, clock)
        if sample.finish == "abort" or not sample.token_ids:
            return Step(error=episode.error or "the engine gave the turn up")
        play.said, play.ended_with = _message(text, f"{name}/{episode.num_turns}", bool(step.tools)), self._end(sample)
        return await play.ask(
            clock, "answer", message=play.said, finish="length" if sample.finish == "length" else "stop",
            prompt_tokens=len(episode.prompt_ids or []) + len(episode.token_ids) - len(sample.token_ids),
            completion_tokens=len(sample.token_ids),
        )  # fmt: skip

    def _is_over(self, episode: Episode, observation: list[int], sampling: Sampling) -> bool:
        """Return True if a budget of the episode is used up, so that no further turn follows."""
        return (
            episode.finish == "length"
            or episode.num_turns == self._config.max_turns
            or episode.num_chosen >= sampling.max_new_tokens
            or len(observation) > self._config.max_observation_tokens
        )

    def _end(self, sample: Sample) -> str:
        last = sample.token_ids[-1]
        return self._decode([last]) if sample.finish == "stop" and last in self._stop_tokens else ""

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class _Play:
    """One episode in progress. ``said``: last turn of the policy; ``ended_with``: text of the turn's stop token."""

    def __init__(self, episode: Episode, conversation: Conversation, keeper: StateKeeper) -> None:
        self.episode, self.conversation, self.keeper = episode, conversation, keeper
        self.said: dict[str, Any] = {}
        self.ended_with = ""

    async def ask(self, clock: TurnClock, purpose: Purpose, **arguments: Any) -> Step:
        """Request the environment's next step. Raises msgspec.DecodeError if the reply is not a step."""
        reply = await self.keeper.ask(clock, ToolRequest(purpose=purpose, arguments=arguments))
        if reply.status != "ok":
            return Step(error=reply.text)
        return msgspec.json.decode(reply.text, type=Step)


def _message(text: str, owner: str, has_tools: bool) -> dict[str, Any]:
    """Return a turn of the policy as a message, with tool calls separate from the text."""
    if not has_tools:
        return {"role": "assistant", "content": text}
    tools = ToolCalls(owner)
    content, calls = tools.push(text)
    content += tools.close()
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        function = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": f} for call, f in zip(calls, function, strict=True)
        ]
    return message


def begun_alike(prompt: Prompt, episodes: Sequence[Episode], *, max_tokens: int) -> Prompt:
    """Return the prompt of a group of episodes. If the environment began the episodes with its own prompt, return a
    copy of ``prompt`` with the text and token ids of that one. Else return ``prompt`` itself.

    The trajectories of a group share one prompt: that of the first episode that got one. Mark each episode that got
    another prompt as failed.
    """
    begun = [episode for episode in episodes if episode.prompt_ids is not None]
    if not begun:
        return prompt
    first = begun[0]
    for episode in begun:
        if episode.prompt_ids != first.prompt_ids:
            episode.fail("the environment began this episode with another prompt than the others of its task")
    ids = list(first.prompt_ids or [])
    return replace(prompt, text=first.prompt_text, token_ids=ids, too_long=len(ids) > max_tokens)
