"""Commands that check a job: audit the ledger, and replay sealed batches bit by bit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.exits import FAILED, OK
from penstock.cli.printing import Job, Json, console, note, number, show_json, show_line, table
from penstock.client import Client
from penstock.shared.errors import Unavailable

__all__ = ["audit", "equation", "replay"]


def audit(job: Job, as_json: Json = False) -> None:
    """Check that a job's ledger is consistent with itself and with the streams; exit 1 on any violation."""
    with Client() as client:
        report = client.audit(client.find(job).id)
    if as_json:
        show_json(report)
    else:
        typer.echo(equation(report["equation"]))
        rows = [("ok" if c["ok"] else "VIOLATED", c["name"], c.get("detail")) for c in report["checks"]]
        console().print(table(("", "CHECK", "DETAIL"), rows))
        for violation in report["violations"]:
            note(f"violation: {violation}")
    raise typer.Exit(OK if report["ok"] else FAILED)


def equation(draws: dict[str, object]) -> str:
    """Format the counts of draws by status as ``drawn 6 = trained 4 + dropped 1 (failed 1) + in flight 1``."""
    dropped = draws.get("dropped") or {}
    by_reason = dict(dropped) if isinstance(dropped, dict) else {}
    total = sum(by_reason.values()) if by_reason else 0
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(by_reason.items()))
    return (
        f"drawn {draws.get('drawn', 0)} = trained {draws.get('trained', 0)} + dropped {total}"
        f"{f' ({reasons})' if reasons else ''} + in flight {draws.get('in_flight', 0)}"
    )


def replay(
    job: Job,
    from_batch: Annotated[int | None, typer.Option("--from", min=0, help="First batch.")] = None,
    to_batch: Annotated[int | None, typer.Option("--to", min=0, help="Last batch.")] = None,
    feedback: Annotated[
        bool,
        typer.Option("--feedback", help="Jobs of live agents: show which answers and feedback each batch trained on."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train sealed batches again and compare digests; exit 1 if they differ. If hardware or packages changed since the
    first training, exit 1 only if the results differ too much."""
    done, ok = False, False
    with Client() as client:
        for row in client.replay(client.find(job).id, from_batch=from_batch, to_batch=to_batch, feedback=feedback):
            done, ok = bool(row.get("done")), bool(row.get("ok"))
            if as_json:
                show_line(row)
            elif done:
                typer.echo(str(row.get("summary", "")))
            else:
                verdict = "identical" if row.get("match") else "near" if row.get("near") else "DIFFERENT"
                typer.echo(f"batch {row.get('batch')}: {verdict}  {row.get('detail', '')}".rstrip())
                for one in row.get("admissions", []):
                    typer.echo(f"  {_feedback_line(one)}")
    if not done:
        raise Unavailable("the replay ended without a verdict; try again")
    raise typer.Exit(OK if ok else FAILED)


def _feedback_line(row: dict[str, Any]) -> str:
    """Format a draw of a replayed batch as ``draw 7.0: reward 1 (feedback), lag 0: ANSWERS by FEEDBACK``. ANSWERS are
    the ids of its answers, FEEDBACK those of the feedback that judged them."""
    answers = ", ".join(row["interactions"] or row["context"]) or "posted material"
    by = ", ".join(row["feedback"]) or "nobody"
    what = row["draw"] if row["objective"] == "policy" else f"{row['draw']} {row['objective']}"
    reward = f"reward {number(row['reward'])} ({row['reason']})"
    return f"draw {what}: {reward}, lag {row['lag']}: {answers} by {by}"
