"""Redaction of records of live requests. The client still receives the answer as sampled."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from penstock.shared.config.online.redaction import RedactionConfig
from penstock.shared.data.redaction import Redactor
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import ConfigError, DataError
from penstock.shared.protocol.live.interaction import USER_TAG, Interaction, Redacted

__all__ = ["UNTRAINABLE", "RecordRedactor"]

UNTRAINABLE = "redacted"
"""Reason why a redacted interaction is not trained: its tokens are not the ones that were read and sampled."""
PART = "\ufffd"
"""Character that a decoder writes for bytes of an incomplete character."""

Spell = Callable[[list[int]], str]
Place = tuple[int, int, str]
"""One match: tokens [start, end) that contain it, and its name."""


@dataclass(frozen=True, slots=True)
class _Across:
    """A match that begins in the prompt and ends in the completion. If there is none, ``rest`` is the whole completion
    and the other fields are empty.

    Attributes:
        in_prompt, in_completion: tokens of the match in either part.
        shown: replacement for the text of the match.
        rest: text of the completion after the match.
    """

    in_prompt: list[Place]
    in_completion: list[Place]
    shown: str
    rest: str


class RecordRedactor:
    """Removes from interactions the data that must not be stored. Blocking: call it in a thread.

    Raises:
        ConfigError: the function cannot be imported, or the patterns match every token that could replace the data.
    """

    def __init__(self, config: RedactionConfig, tokenizer: PreTrainedTokenizerFast, spell: Spell) -> None:
        find = None
        if config.function is not None:
            what = "online.redaction.function:"
            find = import_named(config.function, what=what, beside="rollout", error=ConfigError)
        self._redactor = Redactor(config, find)
        self._spell = spell
        names = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id, 0)
        blanks = (token for token in names if token is not None)
        blank = next((token for token in blanks if not self._redactor.find(spell([token] * 64))), None)
        if blank is None:
            raise ConfigError("online.redaction: its patterns find even the padding token; make them narrower")
        self._blank: int = blank

    def redact(self, interaction: Interaction) -> Interaction:
        """Return the record to store; unchanged without matches. Raises DataError if it must not be stored."""
        across = self._across(interaction)
        prompt_ids, in_prompt = self._blanked(interaction.prompt_ids, across.in_prompt)
        token_ids, in_completion = self._blanked(interaction.token_ids, across.in_completion)
        text = across.shown + self._redactor.replace(across.rest)
        tags = {
            self._redactor.replace(name): tag if name == USER_TAG else self._redactor.replace(tag)  # a pseudonym
            for name, tag in interaction.tags.items()
        }
        calls = [replace(call, arguments=self._redactor.replace(call.arguments)) for call in interaction.calls]
        shown = self._shown(prompt_ids, in_prompt) if in_prompt else self._redactor.replace(interaction.prompt)
        found = [Redacted("prompt", *place) for place in in_prompt]
        found += [Redacted("completion", *place) for place in in_completion]
        changed = bool(found) or text != interaction.text or calls != interaction.calls
        return replace(
            interaction, prompt_ids=prompt_ids, token_ids=token_ids, text=text, tags=tags, calls=calls, redacted=found,
            prompt=shown,
            untrainable=UNTRAINABLE if changed else interaction.untrainable,
        )  # fmt: skip

    def _shown(self, prompt_ids: list[int], places: Sequence[Place]) -> str:
        """Return the text of the redacted prompt, with the name of each match, in brackets, in place of the matched
        passage."""
        text, end = "", 0
        for start, stop, name in places:
            text += self._spell(prompt_ids[end:start]) + f"[{name}]"
            end = max(end, stop)
        return self._redactor.replace(text + self._spell(prompt_ids[end:]))

    def _across(self, interaction: Interaction) -> _Across:
        """Return the match that begins in the prompt and ends in the completion, which neither part shows alone."""
        prompt_ids, text = interaction.prompt_ids, interaction.text
        whole = [*prompt_ids, *interaction.token_ids]
        spelt, border = self._spell(whole), len(self._spell(prompt_ids))
        place = next((one for one in self._redactor.find(spelt) if one.start < border < one.end), None)
        if place is None:
            return _Across([], [], "", text)
        first, last = self._tokens_of(whole, place.start, place.end)
        there, here = [(first, len(prompt_ids), place.name)], [(0, last - len(prompt_ids), place.name)]
        begins = spelt[border : place.end]
        return _Across(there, here, f"[{place.name}]", text.removeprefix(begins) if text.startswith(begins) else "")

    def _blanked(self, ids: list[int], known: list[Place]) -> tuple[list[int], list[Place]]:
        """Return the tokens with blank tokens in place of all matches, and the matches, including ``known`` ones."""
        ids = self._with_blanks(ids, known)
        found = self._redactor.find(self._spell(ids))
        if not found:
            return ids, known
        places = known + [(*self._tokens_of(ids, place.start, place.end), place.name) for place in found]
        places.sort()
        blanked = self._with_blanks(ids, places)
        if self._redactor.find(self._spell(blanked)):  # the text of some tokens depends on others: blank everything
            places = [(0, len(ids), found[0].name)]
            blanked = self._with_blanks(ids, places)
            if self._redactor.find(self._spell(blanked)):
                raise DataError("blank tokens are found as well")
        return blanked, places

    def _tokens_of(self, ids: list[int], start: int, end: int) -> tuple[int, int]:
        """Return the range of tokens that cover the characters [start, end) of the decoded text."""

        def length(count: int) -> int:
            return len(self._spell(ids[:count]))

        counts = range(len(ids) + 1)
        first = max(0, bisect_right(counts, start, key=length) - 1)
        last = min(len(ids), bisect_left(counts, end, key=length))
        while last < len(ids) and self._spell(ids[:last]).endswith(PART):
            last += 1
        return first, last

    def _with_blanks(self, ids: Sequence[int], places: Sequence[Place]) -> list[int]:
        blanked = list(ids)
        for start, stop, _ in places:
            blanked[start:stop] = [self._blank] * (stop - start)
        return blanked
