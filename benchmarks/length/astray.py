"""Wrong answers: what makes them longer.

``examples/ragged/sorting.yaml``: put symbols in their order. A quarter of the demonstrations of the warm start go
astray: from a random place on they are random symbols. An answer that went astray is lost, whatever its length, so its
length must not change. The weight that a loss gives to the tokens of an answer decides whether it does:

    expected gradient after the mistake = |A| E[w(length) grad log pi],  0 for a constant w, since E[grad log pi] = 0

One weight for all tokens (``token_mean``, ``constant``) leaves it alone; ``sequence_mean`` (w = 1 / length) and
``overlong_filter`` (w = 0 at the limit) make wrong answers longer; a punishment of length makes them shorter.
"""

from __future__ import annotations

from report import Report

from length.task import EXAMPLES, Arm, Run, Task, mean

__all__ = ["ASTRAY"]

ARMS = {
    "token_mean": Arm({"aggregation": "token_mean"}),
    "sequence_mean": Arm({"aggregation": "sequence_mean"}),
    "overlong_filter": Arm({"overlong_filter": True}),
    "soft_punishment": Arm({"overlong_punishment": {"buffer": 0.75, "coef": 0.5}}),
    "constant": Arm({"type": "dr_grpo"}),
}
RIGHT_RULE, WRONG_RULES = "token_mean", ("sequence_mean", "overlong_filter")
LONGER, SAME = 1.15, 1.15
"""Tokens after a mistake: under a wrong rule at least this factor of those under the right rule with the same seed;
under the others at most this factor of version 0."""


def fill(report: Report, runs: list[Run]) -> None:
    """A row and a check for each arm."""
    for arm in ARMS:
        own = [run for run in runs if run.arm == arm]
        if not own:
            continue
        growth = [(run.end.astray or 0.0) / (run.start.astray or 1.0) for run in own]
        report.row(
            arm, f"{mean(own, 'start', 'right'):.2f}", f"{mean(own, 'end', 'right'):.2f}",
            f"{mean(own, 'start', 'wrong_length'):.1f}", f"{mean(own, 'end', 'wrong_length'):.1f}",
            f"{mean(own, 'start', 'astray'):.1f}", f"{mean(own, 'end', 'astray'):.1f}",
            " ".join(f"{factor:.2f}" for factor in growth),
            f"{mean(own, 'start', 'truncated'):.3f}", f"{mean(own, 'end', 'truncated'):.3f}",
        )  # fmt: skip
        if arm in WRONG_RULES:
            _check_against_right(report, arm, own, {run.seed: run for run in runs if run.arm == RIGHT_RULE})
        else:
            text = f"{arm}: after a mistake at most {SAME} times the tokens of version 0, each of {len(own)} seeds"
            report.check(text, max(growth) <= SAME)


def _check_against_right(report: Report, arm: str, own: list[Run], right: dict[int, Run]) -> None:
    factors = [(run.end.astray or 0.0) / (right[run.seed].end.astray or 1.0) for run in own if run.seed in right]
    text = f"{arm}: after a mistake at least {LONGER} times the tokens of {RIGHT_RULE}, each of {len(factors)} seeds"
    found = ", ".join(f"{factor:.2f}" for factor in factors)
    report.check(f"{text}: {found}", bool(factors) and min(factors) >= LONGER)


ASTRAY = Task(
    title="Wrong answers on the ragged sorting task: held-out prompts, temperature 1",
    example=EXAMPLES / "sorting.yaml",
    arms=ARMS,
    columns=[
        "arm", "right, start", "end", "tokens if wrong, start", "end", "after the mistake, start", "end",
        "factor by seed", "cut off, start", "end",
    ],
    fill=fill,
    panels={"astray": "tokens after the mistake", "truncated": "share cut off", "right": "share right"},
)  # fmt: skip
