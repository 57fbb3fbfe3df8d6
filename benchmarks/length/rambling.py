"""Right answers: what loses them where an answer that is cut off is a failure.

``examples/ragged/rambling.yaml``: put symbols in their order, in two styles. Half of the demonstrations of the warm
start give the answer, half recite all symbols there are, and the limit cuts them off. Let a be the probability that an
answer comes at all and r that it then is right. What a loss makes of what was cut off decides what is learnt:

    d logit(a) = a (1 - a) (E[A | answers] - E[A | cut off])  up to a positive factor

================  =========================================  ==============
arm               what is cut off ...                        the difference
================  =========================================  ==============
counted           is wrong                                   r
soft_punishment   is wrong, and punished                     r + 1
filtered          leaves the loss, not the group's mean      r (1 - a)
left_out          leaves its group, as what failed to score  0
================  =========================================  ==============

(less a deviation where rewards are divided by one). So ``counted`` and ``soft_punishment`` unlearn to ramble,
``filtered`` does so ever more slowly, and ``left_out`` is pushed nowhere: only what is learnt about answers spills
over. The bounds below were written down after runs with one other seed and before those that they are checked with.
"""

from __future__ import annotations

import statistics

from report import Report

from length.task import EXAMPLES, Arm, Run, Task, mean

__all__ = ["RAMBLING"]

ARMS = {
    "counted": Arm(),
    "soft_punishment": Arm({"overlong_punishment": {"buffer": 0.25, "coef": 1.0}}),
    "filtered": Arm({"overlong_filter": True}),
    "left_out": Arm(cut_off_fails=True),
}
RARE = 0.1
"""Share cut off, mean of ``WINDOW`` updates, from which on rambling is called unlearnt."""
WINDOW = 5
UNLEARNT = 0.1
"""Share cut off at the end: at most, where what is cut off is wrong."""
SLOWER, LOST = 3.0, 0.25
"""``left_out``: at least so many times the updates of ``counted`` with the same seed until it is unlearnt, and at the
end at least so much less right."""


def fill(report: Report, runs: list[Run]) -> None:
    """A row for each arm, and the checks."""
    for arm in ARMS:
        own = sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed)
        if own:
            report.row(
                arm,
                f"{mean(own, 'start', 'truncated'):.2f}", " ".join(f"{run.end.truncated:.2f}" for run in own),
                f"{mean(own, 'start', 'right'):.2f}", " ".join(f"{run.end.right:.2f}" for run in own),
                " ".join(f"{unlearnt_after(run) or f'>{len(run.updates)}'}" for run in own),
                " ".join(f"{_last(run):.3f}" for run in own),
            )  # fmt: skip
    for arm in ("counted", "soft_punishment"):
        margins = [UNLEARNT - run.end.truncated for run in runs if run.arm == arm]
        _bound(report, f"{arm}: at most {UNLEARNT} cut off at the end", margins)
    pairs = _pairs(runs, "filtered", "counted")
    more = [_last(a) - _last(b) for a, b in pairs]
    _bound(report, "filtered: more cut off in the last 10 updates than counted", more)
    pairs = _pairs(runs, "left_out", "counted")
    factors = [(unlearnt_after(a) or len(a.updates)) / (unlearnt_after(b) or len(b.updates)) - SLOWER for a, b in pairs]
    _bound(report, f"left_out: at least {SLOWER} times the updates of counted until unlearnt", factors)
    lost = [b.end.right - a.end.right - LOST for a, b in pairs]
    _bound(report, f"left_out: at least {LOST} less right at the end than counted", lost)


def unlearnt_after(run: Run) -> int | None:
    """Updates until rambling is rare; None if it never is."""
    cut_off = [lengths.truncated for lengths in run.updates]
    ends = range(WINDOW, len(cut_off) + 1)
    return next((end for end in ends if statistics.fmean(cut_off[end - WINDOW : end]) <= RARE), None)


def _last(run: Run) -> float:
    return statistics.fmean(lengths.truncated for lengths in run.updates[-10:])


def _pairs(runs: list[Run], one: str, other: str) -> list[tuple[Run, Run]]:
    """Runs of two arms with the same seed."""
    others = {run.seed: run for run in runs if run.arm == other}
    return [(run, others[run.seed]) for run in runs if run.arm == one and run.seed in others]


def _bound(report: Report, text: str, margins: list[float]) -> None:
    """``margins``: how far each seed is on the right side; nothing is checked of arms that were not run."""
    if margins:
        found = ", ".join(f"{margin:+.2f}" for margin in margins)
        report.check(f"{text}, each of {len(margins)} seeds (margins {found})", min(margins) >= 0)


RAMBLING = Task(
    title="Right answers on the rambling sorting task: held-out prompts, temperature 1",
    example=EXAMPLES / "rambling.yaml",
    arms=ARMS,
    columns=[
        "arm", "cut off, start", "end by seed", "right, start", "end by seed", "unlearnt after", "cut off, last 10",
    ],
    fill=fill,
    panels={"truncated": "share cut off", "right": "share right"},
)  # fmt: skip
