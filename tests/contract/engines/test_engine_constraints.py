"""Answers of a given form: every answer that ends by itself has it, and log-probs stay those of the policy."""

from __future__ import annotations

import asyncio
import json
import string
import threading
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import pytest
import torch

from penstock.services.rollout.conversations.text_stream import ToolCalls
from penstock.services.rollout.engines import EmbeddedEngine, Engine, constraint, open_engine
from penstock.services.rollout.engines.constraint import Grammars
from penstock.shared.config.model import ArchitectureConfig, ModelConfig
from penstock.shared.errors import ConstraintError, Unavailable
from penstock.shared.models import build_model, build_tokenizer
from penstock.shared.protocol.generation import Constraint, GenRequest, Sample, Sampling

pytest.importorskip("llguidance", reason="penstock[structured] is not installed")

EOS = 2
LENGTH = 200
PROMPT = [40, 41, 42]
CHARACTERS = string.printable + "äβ"
ARCHITECTURE = ArchitectureConfig(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, max_position_embeddings=512
)
CONFIG = ModelConfig(config=ARCHITECTURE, tokenizer="char", characters=CHARACTERS)

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"$ref": "#/$defs/age"},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"anyOf": [{"const": None}, {"type": "boolean"}, {"type": "number", "exclusiveMinimum": -5, "maximum": 5}]},
    {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    {"type": "string", "enum": ['say "ä"', "back\\slash", "two\nlines"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
]


def form(schema: dict[str, Any]) -> Constraint:
    return Constraint(asked_by="response_format", json_schema=json.dumps(schema))


def ask(id: str, constraint: Constraint | None, *, seed: int = 0, n: int = 1, **more: Any) -> GenRequest:
    sampling = Sampling(**{"max_new_tokens": LENGTH, "seed": seed, **more})
    return GenRequest(request_id=id, prompt_ids=PROMPT, n=n, sampling=sampling, constraint=constraint)


def text_of(sample: Sample) -> str:
    ended = sample.finish == "stop"
    return str(build_tokenizer(CONFIG).decode(sample.token_ids[:-1] if ended else sample.token_ids))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    opened = open_engine(CONFIG, build_tokenizer(CONFIG), max_running=8, seed=0)
    await opened.start()
    yield opened
    await opened.close()


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
async def test_what_ends_by_itself_is_valid(engine: Engine, schema: dict[str, Any]) -> None:
    results = await asyncio.gather(*(engine.generate(ask(str(k), form(schema), seed=100 * k, n=4)) for k in range(6)))
    ended = 0
    for sample in (sample for result in results for sample in result.samples):
        if sample.finish == "stop":
            jsonschema_rs.validate(schema, json.loads(text_of(sample)))
            ended += 1
        else:
            assert (sample.finish, len(sample.token_ids)) == ("length", LENGTH)
    assert ended >= 4


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 3.0}, {"top_k": 1}, {"top_p": 0.1}], ids=str
)
async def test_any_way_of_sampling_keeps_to_the_form(engine: Engine, sampling: dict[str, Any]) -> None:
    result = await engine.generate(ask("a", form(PERSON), n=4, **sampling))
    for sample in result.samples:
        if sample.finish == "stop":
            jsonschema_rs.validate(PERSON, json.loads(text_of(sample)))
    assert any(text_of(sample).startswith("{") for sample in result.samples)


@pytest.mark.parametrize("parallel", [True, False])
async def test_forced_calls_name_a_tool_and_fit_its_schema(engine: Engine, parallel: bool) -> None:
    tools = {"add": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
                     "additionalProperties": False, "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}},
             "no.op-1": {"type": "object", "properties": {}, "additionalProperties": False}}  # fmt: skip
    wanted = Constraint(
        asked_by="tool_choice", tools=tuple((name, json.dumps(one)) for name, one in tools.items()), parallel=parallel
    )
    most, named = 0, set[str]()
    for sample in (await engine.generate(ask("a", wanted, n=24))).samples:
        if sample.finish != "stop":
            continue
        parser = ToolCalls("x")
        content, calls = parser.push(text_of(sample))
        assert parser.valid is True
        assert not (content + parser.close()).strip()
        for call in calls:
            jsonschema_rs.validate(tools[call.name], json.loads(call.arguments))
        most, named = max(most, len(calls)), named | {call.name for call in calls}
    assert named == set(tools)
    assert most > 1 if parallel else most == 1


async def test_an_answer_is_json_or_a_call_where_both_may_be(engine: Engine) -> None:
    wanted = Constraint(
        asked_by="response_format", json_schema='{"type": "boolean"}', tools=(("f", '{"type": "object"}'),)
    )
    texts = {text_of(sample)[0] for sample in (await engine.generate(ask("a", wanted, n=24))).samples}
    assert texts == {"t", "f", "<"}


async def test_constrained_rows_do_not_change_others(engine: Engine) -> None:
    alone = await engine.generate(ask("alone", None, seed=5, n=3, ignore_eos=True))
    beside, *_ = await asyncio.gather(
        engine.generate(ask("beside", None, seed=5, n=3, ignore_eos=True)),
        *(engine.generate(ask(str(k), form(PERSON), seed=k, n=2)) for k in range(2)),
    )
    assert [sample.token_ids for sample in beside.samples] == [sample.token_ids for sample in alone.samples]


async def test_log_probs_are_those_of_the_policy(engine: Engine) -> None:
    model = build_model(CONFIG, len(build_tokenizer(CONFIG)), seed=0)
    [sample] = (await engine.generate(ask("a", form(PERSON), temperature=0.7))).samples
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *sample.token_ids]])).logits[0].float() / 0.7
    plain = torch.log_softmax(logits[len(PROMPT) - 1 : -1], -1).gather(-1, torch.tensor(sample.token_ids)[:, None])[
        :, 0
    ]
    assert (plain - torch.tensor(sample.logprobs)).abs().max() < 1e-4


async def test_an_answer_is_streamed_token_by_token_with_the_likeliest(engine: Engine) -> None:
    received: list[int] = []
    request = GenRequest(
        request_id="a", prompt_ids=PROMPT, sampling=Sampling(max_new_tokens=LENGTH, seed=3), top_logprobs=3,
        constraint=form(PERSON),
    )  # fmt: skip
    [sample] = (await engine.generate(request, lambda token: received.append(token.token_id))).samples
    await asyncio.sleep(0)
    assert received == sample.token_ids[:-1]
    assert [len(top) for top in sample.top] == [3] * len(sample.token_ids)


async def test_new_weights_in_the_middle_change_nothing_of_the_form(engine: Engine) -> None:
    long = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 20, "maxItems": 20}
    seen = asyncio.Event()
    task = asyncio.create_task(
        engine.generate(
            ask("a", form(long), seed=1, max_new_tokens=480), lambda token: seen.set() if token.token_id > 3 else None
        )
    )
    other = build_model(CONFIG, len(build_tokenizer(CONFIG)), seed=1)
    await seen.wait()
    for version in range(1, 6):
        await engine.begin_update(version=version, digest=f"d{version}", mode="swap")
        await engine.load_chunk({name: one.detach().clone() for name, one in other.named_parameters()})
        await engine.commit_update()
    [sample] = (await task).samples
    assert len(sample.spans) > 1, "no update came while it was written"
    assert sample.finish == "stop"
    jsonschema_rs.validate(long, json.loads(text_of(sample)))


async def test_a_begun_answer_is_continued(engine: Engine) -> None:
    tokenizer = build_tokenizer(CONFIG)
    begun = tokenizer.encode('{"name": "bo', add_special_tokens=False)
    request = GenRequest(
        request_id="a", prompt_ids=[*PROMPT, *begun], n=8, sampling=Sampling(max_new_tokens=LENGTH, seed=3),
        constraint=form(PERSON), answered=len(begun),
    )  # fmt: skip
    ended = [sample for sample in (await engine.generate(request)).samples if sample.finish == "stop"]
    assert ended
    for sample in ended:
        found = json.loads('{"name": "bo' + text_of(sample))
        jsonschema_rs.validate(PERSON, found)
        assert found["name"].startswith("bo")


async def test_a_begun_answer_of_another_form_ends_at_once(engine: Engine) -> None:
    request = GenRequest(
        request_id="a", prompt_ids=PROMPT, sampling=Sampling(max_new_tokens=LENGTH, seed=3),
        constraint=form(PERSON), answered=2,
    )  # fmt: skip
    [sample] = (await engine.generate(request)).samples
    assert (sample.finish, sample.token_ids) == ("length", [EOS])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "strin"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "(open"}, "unclosed"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"allOf": [{"pattern": "^(.*a.{20})$"}, {"pattern": "^.*b.{19}c$"}], "type": "string"}, "Unable to determine"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_schema_that_cannot_be_kept_to_is_refused(engine: Engine, schema: Any, words: str) -> None:
    constraint = Constraint(asked_by="response_format", json_schema=json.dumps(schema))
    with pytest.raises(ConstraintError, match=words) as error:
        await engine.prepare(constraint)
    assert "<state>" not in str(error.value)
    with pytest.raises(ConstraintError, match=words):
        await engine.generate(ask("a", constraint))
    assert (await engine.health())["running"] == 0


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_new_tokens": 3}], ids=str)
async def test_an_end_that_is_forbidden_is_refused(engine: Engine, more: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match="ends where the form does"):
        await engine.generate(ask("a", form(PERSON), **more))


@pytest.mark.parametrize("missing", ['"', "{", "a"])
async def test_characters_that_the_tokenizer_lacks(missing: str) -> None:
    config = CONFIG.model_copy(update={"characters": CHARACTERS.replace(missing, "")})
    engine = open_engine(config, build_tokenizer(config), max_running=8, seed=0)
    await engine.start()
    try:
        if missing == "{":
            with pytest.raises(ConstraintError, match="no tokens"):
                await engine.prepare(form(PERSON))
            return
        for sample in (await engine.generate(ask("a", form(PERSON), n=8))).samples:
            assert sample.finish == "length", "no such answer can be complete"
    finally:
        await engine.close()


async def test_an_engine_without_a_tokenizer_says_so() -> None:
    model = build_model(CONFIG, len(build_tokenizer(CONFIG)), seed=0)
    engine = EmbeddedEngine(model, max_running=1, stop_ids=[EOS], detokenize=str)
    await engine.start()
    with pytest.raises(ConstraintError, match="no tokenizer"):
        await engine.prepare(form(PERSON))
    await engine.close()


async def test_the_extra_is_named_where_it_is_missing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConstraintError, match=r"penstock\[structured\]"):
        await engine.prepare(form(PERSON))


async def test_a_form_is_compiled_once() -> None:
    tokenizer = build_tokenizer(CONFIG)
    grammars = Grammars(tokenizer, vocab_size=len(tokenizer) + 7, stop_ids=[EOS])
    one, two, other = await asyncio.gather(*(grammars.compile(form(s)) for s in (PERSON, PERSON, SCHEMAS[1])))
    assert one is two is not other
    await grammars.close()


async def test_a_request_that_waits_for_other_forms_is_asked_to_retry(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    compiled = constraint._compiled

    def slow(*args: Any) -> Any:
        assert go_on.wait(30)
        return compiled(*args)

    await engine.prepare(form({"type": "null"}))  # the vocabulary is there
    monkeypatch.setattr(constraint, "_compiled", slow)
    monkeypatch.setattr(constraint, "COMPILE_S", 0.2)
    forms = [form({"type": "integer", "minimum": low}) for low in range(constraint.MAX_PENDING + 1)]
    results = await asyncio.gather(*map(engine.prepare, forms), return_exceptions=True)
    assert [type(error) for error in results[: constraint.AT_ONCE]] == [ConstraintError] * constraint.AT_ONCE
    assert {type(error) for error in results[constraint.AT_ONCE :]} == {Unavailable}
    assert "wait to be compiled" in str(results[-1])
    go_on.set()
    monkeypatch.setattr(constraint, "COMPILE_S", 20.0)
    await engine.prepare(forms[0])
