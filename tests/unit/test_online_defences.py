"""`online.defences`: the values that the preset sets, the fields that override it, the warning without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.submission import plan_job
from penstock.shared.config.base import load_yaml
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import STANDARD, OnlineConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "online-guarded.yaml"


def job(**online: Any) -> OnlineJob:
    return OnlineJob.parse(
        {"kind": "online_rl", "name": "a", "model": {"config": {}, "tokenizer": "char"}, "online": online}
    )


def test_the_preset_sets_what_the_job_file_does_not() -> None:
    online = job(defences="standard").online
    assert (online.raters, online.max_share_per_key, online.max_share_per_user) == ("same_key", 0.2, 0.02)
    assert online.quarantine is not None
    assert online.promotion is not None
    assert (online.promotion.max_mismatch, online.promotion.min_entropy) == (0.05, 0.02)
    written = job(
        defences="standard", max_share_per_key=0.5, raters="any", quarantine=None, promotion={"max_mismatch": 0.2}
    ).online
    assert (written.raters, written.max_share_per_key, written.max_share_per_user) == ("any", 0.5, 0.02)
    assert written.quarantine is None
    assert written.promotion is not None
    assert (written.promotion.max_mismatch, written.promotion.min_entropy) == (0.2, 0.02)


def test_job_files_without_the_preset_do_not_change() -> None:
    bare = job().online
    assert bare == OnlineConfig()
    assert not bare.is_defended
    assert (bare.max_share_per_key, bare.raters, bare.quarantine, bare.promotion) == (1.0, "any", None, None)


def test_a_stored_job_holds_the_preset_values() -> None:
    first = job(defences="standard", quarantine={"min_items": 20})
    stored = first.model_dump(mode="json", exclude_unset=True)
    assert stored["online"]["max_share_per_user"] == STANDARD["max_share_per_user"]
    assert stored["online"]["promotion"] == STANDARD["promotion"]
    assert parse_job(stored) == first == parse_job(first.model_dump(mode="json"))


def test_a_batch_too_small_for_a_share_names_the_size_needed() -> None:
    with pytest.raises(ConfigError, match=r"max_share_per_user: 0.02 of a batch of 32 .* train.batch_size to 50"):
        OnlineJob.parse(
            {**job().model_dump(mode="json"), "train": {"batch_size": 32}, "online": {"defences": "standard"}}
        )


@pytest.mark.parametrize(
    ("host", "online", "warned"),
    [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("0.0.0.0", {"defences": "standard"}, False),
        ("0.0.0.0", {"raters": "same_key"}, False),
        ("0.0.0.0", {"max_share_per_asker": 0.5}, False),
        ("0.0.0.0", {"quarantine": {}}, False),
    ],
)
async def test_submitting_a_job_without_defences_warns(host: str, online: dict[str, Any], warned: bool) -> None:
    settings = ServiceSettings(http_host=host, api_keys="k")
    plan = await plan_job(job(**online), [], settings, stores_parts=True)
    assert bool(plan["warnings"]) is warned
    assert not warned or "online.defences: standard" in plan["warnings"][0]


async def test_the_example_is_guarded() -> None:
    spec = parse_job(load_yaml(EXAMPLE))
    plan = await plan_job(spec, [], ServiceSettings(http_host="0.0.0.0", api_keys="k"), stores_parts=True)
    assert plan["warnings"] == []
    shown = plan["spec"]["online"]
    assert (shown["max_share_per_user"], shown["quarantine"]["min_items"]) == (0.02, 20)
