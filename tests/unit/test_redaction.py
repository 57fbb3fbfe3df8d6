"""Secrets that must not be stored are found in texts, and the tokens that spell them are blanked."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.services.coordinator.feedback.items import Identity, item_of
from penstock.services.coordinator.feedback.jobs import LiveJob
from penstock.services.coordinator.feedback.posts import POST
from penstock.services.rollout.serving.redaction import UNTRAINABLE, RecordRedactor
from penstock.shared.config.online.redaction import RedactionConfig
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.data.redaction import Found, Redactor
from penstock.shared.errors import ConfigError, DataError, Invalid
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.inference import ToolCall
from penstock.shared.protocol.live.interaction import Interaction, Redacted

EMAIL = r"[a-z.]+@[a-z.]+"
PHONE = r"\d{3}-\d{4}"


def config(**fields: Any) -> RedactionConfig:
    return RedactionConfig.parse(fields)


def test_matches_are_in_order_and_overlapping_ones_are_merged() -> None:
    redactor = Redactor(config(patterns={"email": EMAIL, "phone": PHONE, "digits": r"\d+"}))
    text = "write to ann@x.org or call 555-1234, not 7"
    assert redactor.find(text) == [Found(9, 18, "email"), Found(27, 35, "phone"), Found(41, 42, "digits")]
    assert redactor.replace(text) == "write to [email] or call [phone], not [digits]"
    assert redactor.replace("nothing here") == "nothing here"


def test_texts_in_json_are_replaced_and_keys_are_not() -> None:
    redactor = Redactor(config(patterns={"email": EMAIL}))
    value = {"a@b": ["me a@b", {"x": "c@d"}], "n": 7, "none": None, "flag": True}
    assert redactor.replace_all(value) == {"a@b": ["me [email]", {"x": "[email]"}], "n": 7, "none": None, "flag": True}


def test_a_function_finds_what_patterns_do_not() -> None:
    def names(text: str) -> list[tuple[int, int, str]]:
        place = text.find("Ann")
        return [(place, place + 3, "name")] if place >= 0 else []

    redactor = Redactor(config(patterns={"email": EMAIL}), names)
    assert redactor.replace("Ann is ann@x.org") == "[name] is [email]"
    for wrong in (lambda text: [(0, 99, "x")], lambda text: [(2, 1, "x")], lambda text: [(0, 1)], lambda text: 1 / 0):
        with pytest.raises(DataError, match="redaction function"):
            Redactor(config(function="a:b"), wrong).find("text")  # type: ignore[arg-type]


def test_no_pattern_needs_exponential_time() -> None:
    """On this text Python's own `re` would try two ways for every character."""
    redactor = Redactor(config(patterns={"x": "(a|aa)+$"}))
    assert redactor.find("a" * 10_000 + "b") == []


def test_positions_count_unicode_characters() -> None:
    redactor = Redactor(config(patterns={"digits": r"\d+"}))
    assert redactor.find("ö😀\ud800 12 \udfff3") == [Found(4, 6, "digits"), Found(8, 9, "digits")]


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"[\w.]+@[\w-]+\.\w+", "an jürgen@müller.de!", "jürgen@müller.de"),
        (r"Konto\s\d+", "Konto\u00a0\u0661\u0662", "Konto\u00a0\u0661\u0662"),
        (r"[^\s@]+@", "x ö\u3000é@", "é@"),
        (r"\D+", "12 ab\u0663", " ab"),
        (r"\S+\W", " ab, c", "ab, "),
        (r"[\s\S]+", " é\n", " é\n"),
        (r"[]\d]+", "a]2]b", "]2]"),
        (r"[^]a]+", "]xy]", "xy"),
        (r"[a[]b", "x[b", "[b"),
        (r"\[\w\]", "x[ö]", "[ö]"),
        (r"(?i)özdemir", "ÖZDEMIR", "ÖZDEMIR"),
        (r"\\w", r"a\w", r"\w"),
        (r"\p{Lu}\d{2}", "aÖ12", "Ö12"),
    ],
)
def test_classes_hold_the_characters_of_all_languages(pattern: str, text: str, found: str) -> None:
    (place,) = Redactor(config(patterns={"x": pattern})).find(text)[:1]
    assert text[place.start : place.end] == found


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "give patterns or function"),
        ({"patterns": {"x": "("}}, r"not a regular expression of RE2: missing \)"),
        ({"patterns": {"x": "(?<=a)b"}}, "RE2: invalid perl operator"),
        ({"patterns": {"x": r"\bann\b"}}, "knows ASCII letters alone"),
        ({"patterns": {"x": r"[^\W_]+"}}, "in brackets"),
        ({"patterns": {"x": "a\\"}}, "not a regular expression of RE2: trailing"),
        ({"patterns": {"x": "a*"}}, "matches an empty text"),
        ({"patterns": {"Not A Name": "a"}}, "patterns"),
        ({"function": "no colon"}, "function"),
    ],
)
def test_invalid_patterns_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(**fields)


# -- records ----------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, as byte-level tokenizers have for rare characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({"<pad>": 0, **{token: i for i, token in enumerate(alphabet, 1)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


TOKENIZER = byte_tokenizer()


def spell(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def record(prompt: str, completion: str, **changes: Any) -> Interaction:
    prompt_ids, token_ids = TOKENIZER.encode(prompt), TOKENIZER.encode(completion)
    fields: dict[str, Any] = {
        "id": "i", "request": "i", "index": 0, "job": "j", "episode": "e", "key_id": "k", "user": "u", "split": "train",
        "untrainable": "", "prompt_ids": prompt_ids, "token_ids": token_ids, "logprobs": [-0.5] * len(token_ids),
        "spans": [Span(0, 0, len(token_ids))], "sampling": Sampling(max_new_tokens=64), "finish": "stop",
        "template": "t", "body_digest": "b", "text": completion, "prompt": prompt,
        "started": 0.0, "first_token": 0.0, "ended": 0.0,
    }  # fmt: skip
    return Interaction(**fields | changes)


def test_tokens_of_a_secret_are_blanked_and_the_others_stay() -> None:
    redactor = RecordRedactor(config(patterns={"email": EMAIL, "phone": PHONE}), TOKENIZER, spell)
    plain = record("hello", "good day")
    assert redactor.redact(plain) == plain, "where nothing is found, nothing changes"

    found = redactor.redact(record("I am ann@x.org, äö 😀", "call 555-1234 or bob@y.de!"))
    assert spell(found.token_ids) == "call <pad><pad><pad><pad><pad><pad><pad><pad> or " + "<pad>" * 8 + "!"
    assert spell(found.prompt_ids) == "I am " + "<pad>" * 9 + ", äö 😀"
    assert found.text == "call [phone] or [email]!"
    assert found.redacted == [
        Redacted("prompt", 5, 14, "email"),
        Redacted("completion", 5, 13, "phone"),
        Redacted("completion", 17, 25, "email"),
    ]
    assert len(found.logprobs) == len(found.token_ids)
    assert found.untrainable == UNTRAINABLE == "redacted"


def test_characters_of_several_tokens_are_blanked_whole() -> None:
    redactor = RecordRedactor(config(patterns={"sign": "[ö😀]+"}), TOKENIZER, spell)
    found = redactor.redact(record("a", "ab ö😀ö cd"))
    assert spell(found.token_ids) == "ab " + "<pad>" * 8 + " cd"


def test_a_secret_across_prompt_and_completion_is_blanked_in_both() -> None:
    redactor = RecordRedactor(config(patterns={"email": EMAIL, "phone": PHONE}), TOKENIZER, spell)
    found = redactor.redact(record("a@b.c write to ann", "@x.org or 555-1234"))
    assert spell(found.prompt_ids) == "<pad>" * 5 + " write to <pad><pad><pad>"
    assert found.prompt == "[email] write to [email]"
    assert spell(found.token_ids) == "<pad>" * 6 + " or " + "<pad>" * 8
    assert found.text == "[email] or [phone]"
    assert found.redacted == [
        Redacted("prompt", 0, 5, "email"), Redacted("prompt", 15, 18, "email"),
        Redacted("completion", 0, 6, "email"), Redacted("completion", 10, 18, "phone"),
    ]  # fmt: skip
    assert found.untrainable == UNTRAINABLE
    shown_otherwise = redactor.redact(record("write to ann", "@x.org", text=" @x.org"))
    assert shown_otherwise.text == "[email]", "the shown text may differ from the text of the tokens"


def test_a_secret_in_the_prompt_makes_a_record_untrainable_and_one_in_tags_not() -> None:
    redactor = RecordRedactor(config(patterns={"email": EMAIL}), TOKENIZER, spell)
    assert redactor.redact(record("a@b.c", "yes", untrainable="sampling_not_replayable")).untrainable == UNTRAINABLE
    assert redactor.redact(record("to a@b.c!", "yes")).prompt == "to [email]!"
    assert redactor.redact(replace(record("to anne", "yes"), prompt="to a@b.c")).prompt == "to [email]", (
        "the text of the prompt may hold more than its tokens"
    )
    assert redactor.redact(record("to anne", "yes")).prompt == "to anne"
    tagged = redactor.redact(record("hello", "yes", tags={"who": "a@b.c", "task": "t"}))
    assert (tagged.tags, tagged.untrainable) == ({"who": "[email]", "task": "t"}, "")
    redactor = RecordRedactor(config(patterns={"phone": PHONE}), TOKENIZER, spell)
    tagged = redactor.redact(record("hello", "yes", tags={"user_id": "555-1234", "who": "555-1234"}))
    assert tagged.tags == {"user_id": "555-1234", "who": "[phone]"}, "the pseudonym of a user is never redacted"


def test_names_of_tags_are_blanked_and_identifying_ones_refused() -> None:
    redactor = RecordRedactor(config(patterns={"email": EMAIL}), TOKENIZER, spell)
    assert redactor.redact(record("hello", "yes", tags={"a@b.c": "x"})).tags == {"[email]": "x"}
    job = LiveJob("j", "live", False, OnlineConfig(), Redactor(config(patterns={"email": EMAIL})))
    body = {"kind": "interaction", "model": "live", "completion": {"content": "yes"}}
    for more, place in (({"group_id": "of ann@x.org"}, "/group_id"), ({"tags": {"a@b.c": "x"}}, "/tags/0")):
        with pytest.raises(Invalid, match="send another name") as refused:
            item_of(POST.validate_python(body | more), job, Identity("f", "k", chosen=False), str)
        assert refused.value.flaws[0].pointer == place
    kept = item_of(POST.validate_python(body | {"group_id": "7"}), job, Identity("f", "k", chosen=False), str)
    assert kept.body["group_id"] == "7"


def test_arguments_of_tool_calls_are_blanked() -> None:
    redactor = RecordRedactor(config(patterns={"email": EMAIL}), TOKENIZER, spell)
    call = ToolCall("c1", "send", '{"to": "ann@x.org"}')
    found = redactor.redact(replace(record("hello", "yes"), calls=[call]))
    assert found.calls == [ToolCall("c1", "send", '{"to": "[email]"}')]
    assert found.untrainable == UNTRAINABLE


def test_a_job_without_a_usable_padding_token_or_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding token"):
        RecordRedactor(config(patterns={"all": r"[\s\S]"}), TOKENIZER, spell)
    for path, text in (
        ("no.such.module:f", "cannot be imported"),
        ("json:nothing", "cannot be imported"),
        ("json:decoder", "not a function"),
    ):
        with pytest.raises(ConfigError, match=text):
            RecordRedactor(config(function=path), TOKENIZER, spell)


def test_a_failing_function_stores_nothing() -> None:
    calls = iter([[], ValueError("broken")])

    def once(text: str) -> Any:
        found = next(calls)
        if isinstance(found, ValueError):
            raise found
        return found

    redactor = RecordRedactor(config(patterns={"email": EMAIL}), TOKENIZER, spell)
    redactor._redactor = Redactor(config(patterns={"email": EMAIL}), once)
    assert redactor._redactor.find("first") == []
    with pytest.raises(DataError, match="broken"):
        redactor.redact(record("hello", "yes"))
