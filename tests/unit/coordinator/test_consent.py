"""Consent of users: a job trains on all users but those who objected, or only on those who agreed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.coordinator.feedback.privacy import OPTED_IN, OPTED_OUT, Consents, objection
from penstock.services.coordinator.online.examples import InteractionRecord
from penstock.services.coordinator.online.matching import Matching
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Feedback, Interaction

NOW = 1000.0
USERS = {"willing": True, "unwilling": False}


@pytest.mark.parametrize(
    ("choice", "opt_out", "opt_in"), [(True, "", ""), (None, "", "no_consent"), (False, "opted_out", "opted_out")]
)
def test_silence_is_consent_only_if_the_job_says_so(choice: bool | None, opt_out: str, opt_in: str) -> None:
    assert (objection(choice, "opt_out"), objection(choice, "opt_in")) == (opt_out, opt_in)


class NoBus:
    def kv(self, bucket: str) -> None:
        """Return nothing: no test here uses the bus."""


def test_the_newest_choice_of_a_user_counts_and_can_be_deleted() -> None:
    consents = Consents(NoBus())  # type: ignore[arg-type]
    assert (consents.of("u"), consents.opted_out("u")) == (None, False)
    for value, expected in ((OPTED_IN, True), (OPTED_OUT, False), (OPTED_IN, True), (None, None)):
        consents._take("u", value)
        assert consents.of("u") is expected
        assert consents.opted_out("u") is (expected is False)


def trained(consent: str, user: str, **changes: Any) -> str:
    """Return why an answer to a user is refused, or '' if it is trained."""
    config = OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 4},
            "online": {"metrics": {"rating": {"type": "float"}}, "consent": consent, "off_policy": {"supervised": {}}},
        }
    )  # fmt: skip
    matching = Matching(config, opted_out=lambda user: bool(objection(USERS.get(user), config.online.consent)))
    one = Interaction(
        id="i", request="i", index=0, job="j", episode="e", alone=True, key_id="k", user=user, split="train",
        untrainable="", prompt_ids=[7], token_ids=[1], logprobs=[-0.5], spans=[Span(0, 0, 1)],
        sampling=Sampling(max_new_tokens=4), finish="stop", template="t", body_digest="b", text="x", started=NOW,
        first_token=NOW, ended=NOW,
    )  # fmt: skip
    fields = {"kind": "metric", "metric": "rating"} | changes
    item = Feedback(id="f", job="j", key_id="k", received=NOW, inference="i", value=1.0, **fields)
    matching.examples.add_record("i", InteractionRecord.of(1, one))
    statuses = [*matching.on_interaction(1, one), *matching.on_feedback(1, item, NOW)]
    statuses += matching.sweep(version=0, now=NOW)
    refused = [one.reason for one in statuses if one.status == "rejected"]
    assert bool(refused) is not bool(matching.ready or matching.examples.ready)
    return refused[0] if refused else ""


@pytest.mark.parametrize("item", [{}, {"kind": "correction", "metric": "", "body": {"corrected": "x"}}])
@pytest.mark.parametrize(
    ("user", "opt_out", "opt_in"),
    [
        ("willing", "", ""),
        ("silent", "", "no_consent"),
        ("", "", "no_consent"),
        ("unwilling", "opted_out", "no_consent"),
    ],
)
def test_answers_and_corrections_need_the_required_consent(
    user: str, opt_out: str, opt_in: str, item: dict[str, Any]
) -> None:
    assert trained("opt_out", user, **item) == opt_out
    assert trained("opt_in", user, **item) == opt_in
