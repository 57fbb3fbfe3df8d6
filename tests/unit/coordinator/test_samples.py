"""Sampled completions as the API shows them: advantages, and the texts of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.services.coordinator.online.groups import example_group
from penstock.services.coordinator.queries.samples import check_env, sample_rows, token_texts
from penstock.shared.errors import NotFound
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group

EXACT = {"type": "exact"}


def group(*rewards: float, failed: tuple[int, ...] = ()) -> Group:
    answers = [[5, 6]] * len(rewards)
    one = example_group("j", Draw(0, 0), [4], answers, objective="policy", reward=0.0, epoch=1)
    broken = np.zeros(len(rewards), np.bool_)
    broken[list(failed)] = True
    return replace(one, rewards=np.array(rewards, np.float32), failed=broken)


def advantages(one: Group) -> list[float | None]:
    return [row["advantage"] for row in sample_rows(1, [one])]


def test_a_source_that_a_job_does_not_have_is_refused_with_those_it_has() -> None:
    base = {"name": "j", "model": {"config": {}, "tokenizer": "char"}}
    evaluation = {**base, "kind": "evaluation", "data": {"eval": {"type": "addition"}}, "reward": {"scorers": [EXACT]}}
    check_env(evaluation, "addition")
    with pytest.raises(NotFound, match=r"'hard'; they are called addition$"):
        check_env(evaluation, "hard")
    with pytest.raises(NotFound, match="it has none, for live agents send its prompts"):
        check_env({**base, "kind": "online_rl"}, "addition")


def test_a_completion_without_others_to_compare_has_no_advantage() -> None:
    assert advantages(group(1.0)) == [None], "as every answer to a live agent"
    assert advantages(group(1.0, 0.5, failed=(1,))) == [None, None]
    assert advantages(group(1.0, 1.0)) == [0.0, 0.0], "there is something, and it is the same"
    assert advantages(group(1.0, 0.0, 0.5, failed=(2,))) == [
        pytest.approx(0.7071, abs=1e-4),
        pytest.approx(-0.7071, abs=1e-4),
        None,
    ]


TEXT = "Der Fluß floß, 3+4=7 \u2713\n"


@pytest.mark.parametrize("kind", ["bytes", "pieces", "words"])
def test_tokens_are_shown_as_their_texts(tmp_path: Path, kind: str) -> None:
    """The joined texts of the tokens equal what the tokenizer decodes."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            [TEXT] * 3, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "pieces":
        pieces = [
            ("<unk>", 0.0),
            *(("\u2581" if char == " " else char, -1.0) for char in sorted(set(TEXT))),
        ]
        tokenizer = Tokenizer(models.Unigram(pieces, 0))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            decoders.Metaspace(prepend_scheme="never"),
        )
    else:
        tokenizer = Tokenizer(models.WordLevel({char: id for id, char in enumerate(sorted(set(TEXT)))}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)|\n"), "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    if kind == "bytes":  # a character of several tokens has no text in any of them
        ids = tokenizer.encode("Der Flu").ids
    found = token_texts(tmp_path / "tokenizer.json", [*ids, tokenizer.token_to_id("<eos>"), 10**6])
    assert "".join(found[:-2]) == ("Der Flu" if kind == "bytes" else TEXT)
    assert found[-2:] == ["<eos>", "<1000000>"]
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json"):
        token_texts(tmp_path / "other.json", ids)
