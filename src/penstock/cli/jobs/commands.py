"""Commands that submit, show and control jobs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli.exits import result_code
from penstock.cli.jobs.watching import follow
from penstock.cli.printing import (
    Job,
    Json,
    ago,
    console,
    note,
    note_warnings,
    number,
    show_done,
    show_json,
    table,
)
from penstock.client import Client
from penstock.client.beside import JobText, with_neighbours
from penstock.shared.config.base import load_yaml, parse_yaml, with_overrides
from penstock.shared.config.jobs.kinds import AnyJob, parse_job
from penstock.shared.errors import ConfigError, PenstockError
from penstock.shared.protocol.jobs import PHASES, JobRecord
from penstock.shared.protocol.scaling import POOLS

__all__ = [
    "amend",
    "cancel",
    "clone",
    "extend",
    "get",
    "load_file",
    "load_job",
    "ls",
    "pause",
    "plan_lines",
    "resume",
    "rm",
    "scale",
    "state_table",
    "submit",
    "wait",
]

STDIN = Path("-")
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, like train.seed=3.")]


def submit(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML); - reads standard input.")],
    overrides: Overrides = None,
    follow_it: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow to the end; exit with the job's result.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate and show the plan; --json: all of it.")] = False,
    key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Idempotency key; a repeated key submits nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a job file."""
    job = load_file(file, overrides or [])
    with Client() as client:
        if dry_run:
            plan = client.dry_run(job)
            if as_json:
                show_json(plan)
            else:
                typer.echo("\n".join(plan_lines(plan)))
            return
        record = client.submit(job, idempotency_key=key)
        _print_warnings(client, record)
    if not follow_it:
        if as_json:
            show_json(record)
        else:
            typer.echo(record.id)
            note(f"submitted '{record.name}'; watch it with: penstock top {record.id}")
            if record.spec.get("kind") == "online_rl":
                note(
                    f"agents ask it as model '{record.name}' at {client.url}/v1 and post to {client.url}/feedback "
                    f"once it runs: penstock wait {record.name} --for running"
                )
        return
    raise typer.Exit(follow(record, as_json=as_json))


def _print_warnings(client: Client, record: JobRecord) -> None:
    """Print the coordinator's warnings about a submitted job. Print nothing if the API key may not read the job's
    events."""
    with contextlib.suppress(PenstockError):
        for row in client.events(record.id, follow=False):
            if row["type"] == "submitted" and row["level"] == "warning":
                note(f"warning: {row['message']}")


def load_file(file: Path, overrides: list[str]) -> JobText:
    """Load a job file (``-``: standard input) and the files that it names, apply ``overrides``, and validate the job.

    Raises ConfigError.
    """
    where = "standard input" if file == STDIN else str(file)
    data = parse_yaml(sys.stdin.read(), where=where) if file == STDIN else load_yaml(file)
    text = with_neighbours(with_overrides(data, overrides), Path() if file == STDIN else file.parent)
    parse_job(text.data, where=where)
    return text


def load_job(file: Path, overrides: list[str]) -> AnyJob:
    """Load a job file with ``overrides`` as a config object; user code is not imported. Raises ConfigError."""
    return parse_job(load_file(file, overrides).data, where=str(file))


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """Format the plan of a dry run."""
    spec, data, size, batch = plan["spec"], plan.get("data", {}), plan["bytes"], plan.get("batch", {})
    rows = [("job", f"{spec['name']}, kind {spec['kind']}: valid")]
    for name in ("train", "eval"):
        found = [f"{source['name']} ({source['rows']:,} rows)" for source in data.get(name, ())]
        rows += [(name, ", ".join(found))] if found else []
    if batch:
        sampled = f"{batch['groups']} groups x {batch['group_size']} = {batch['trajectories']} trajectories"
        updates = spec.get("train", {}).get("max_updates")
        rows.append(("update", sampled + (f", at most {updates} times" if updates else "")))
    if held_out := plan.get("evaluation"):
        rows.append(("evaluation", ", ".join(f"{key} {_shown(value)}" for key, value in held_out.items())))
    rows.append(("room", f"a group takes at most {size['group_max']:,} of {size['budget']:,} bytes"))
    rows += [("note", note) for note in data.get("notes", ())]
    rows += [("warning", text) for text in plan["warnings"]]
    return [f"{name:<11}{text}" for name, text in rows]


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def amend(
    job: Job,
    overrides: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Like train.max_updates=300.")],
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until the job applies it.")] = 5,
    as_json: Json = False,
) -> None:
    """Change a job while it runs: train.max_updates, checkpoint, limits, learning rate, KL coefficient, temperature,
    backend, metadata."""
    with Client() as client:
        record = client.find(job)
        changed = client.amend(record.id, with_overrides({}, overrides), revision=record.revision, wait_s=wait_s)
    if as_json:
        show_json(changed)
        return
    step = changed["applies_at_step"]
    followed = changed["status"]["observed_generation"] >= changed["generation"]
    when = f" from update {step} on" if step is not None else "" if followed else " once its leader takes it up"
    typer.echo(f"{record.id} changed{when}")


def extend(
    job: Job,
    max_updates: Annotated[
        int, typer.Option("--max-updates", min=1, help="Total policy updates, including the finished ones.")
    ],
    *,
    follow_it: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow to the end; exit with the job's result.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a job that has ended, with its optimizer state, data order, numbering and ledger."""
    with Client() as client:
        record = client.find(job)
        extended = client.extend(record.id, max_updates)
        for text in extended["notes"]:
            note(f"note: {text}")
        record = client.get(record.id)
    if follow_it:
        raise typer.Exit(follow(record, as_json=as_json))
    if as_json:
        show_json(extended)
    else:
        typer.echo(f"{record.id} goes on from update {record.status.step} to {max_updates}")


def clone(
    job: Job,
    *,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the copy; default: the same.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate and show the plan.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a copy of a job, with changes."""
    with Client() as client:
        record = client.find(job)
        spec = dict(record.spec) | ({"name": name} if name is not None else {})
        if record.origin is not None:
            spec["model"] = {**spec["model"], "path": record.origin.checkpoint}
        copy = parse_job(with_overrides(spec, overrides or []), where=f"the copy of {record.id}")
        if dry_run:
            show_json(client.dry_run(copy))
            return
        made = client.submit(copy)
        _print_warnings(client, made)
    if as_json:
        show_json(made)
    else:
        typer.echo(made.id)
        note(f"submitted '{made.name}', a copy of {record.id}; watch it with: penstock top {made.id}")


def ls(
    *,
    phase: Annotated[str | None, typer.Option(help="Only this phase.")] = None,
    name: Annotated[str | None, typer.Option(help="Only this name.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only this kind: rl, online_rl, embodied, evaluation, serving.")
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Only with this label.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number of rows.")] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    if phase is not None and phase not in PHASES:
        raise ConfigError(f"'{phase}' is no phase; there are: {', '.join(PHASES)}")
    wanted = dict(_label(text) for text in labels or [])
    with Client() as client:
        records = client.list(limit=limit, phase=phase, name=name, kind=kind, metadata=wanted)
    if as_json:
        show_json([record.model_dump(mode="json") for record in records])
        return
    rows = [(r.id, r.name, _phase(r), _progress(r), number(r.status.reward), ago(r.created_at)) for r in records]
    console().print(table(("ID", "NAME", "PHASE", "STEP#", "REWARD#", "AGE#"), rows))


def _label(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep:
        raise ConfigError(f"'{text}' is no label; write it like team=vision")
    return key, value


def get(job: Job, as_json: Json = False) -> None:
    """Show a job: its state, how many draws were trained or dropped, and its conditions."""
    with Client() as client:
        record = client.find(job)
    if as_json:
        show_json(record)
    else:
        console().print(state_table(record))


def state_table(record: JobRecord) -> Table:
    """Return a table of a job's state, its numbers of trained, in-flight and dropped draws, and its conditions."""
    status = record.status
    dropped = status.draws.get("dropped", {})
    rows = [
        ("id", record.id),
        ("name", record.name),
        ("phase", f"{status.phase} {status.message}".strip()),
        *([("error", " of ".join(filter(None, (status.error.code, status.error.service))))] if status.error else []),
        ("wanted", record.desired_state),
        ("step", _progress(record)),
        ("policy version", status.policy_version),
        *([("served version", status.served_version)] if status.served_version is not None else []),
        *([("canary", _canary(status.canary))] if status.canary is not None else []),
        ("reward", number(status.reward)),
        ("drawn", number(status.draws.get("drawn"))),
        ("  trained", number(status.draws.get("trained"))),
        ("  in flight", number(status.draws.get("in_flight"))),
        *((f"  dropped: {reason}", number(count)) for reason, count in sorted(dropped.items())),
        ("checkpoint", status.checkpoint),
        *([("  best", _best(status.best_checkpoint))] if status.best_checkpoint else []),
        ("created", record.created_at.isoformat(timespec="seconds")),
        *((c.type, f"{c.status} {c.reason} {c.message}".strip()) for c in status.conditions),
        *((f"warning: {w.kind}", w.message) for w in status.warnings),
    ]
    return table(("FIELD", "VALUE"), rows)


def wait(
    job: Job,
    goal: Annotated[str, typer.Option("--for", help="terminal, or a phase.")] = "terminal",
    timeout: Annotated[float | None, typer.Option(help="Give up after this many seconds (exit code 1).")] = None,
    as_json: Json = False,
) -> None:
    """Wait for the end of a job, or for a phase; exit with its result."""
    if goal not in ("terminal", *PHASES):
        raise ConfigError(f"'{goal}' is no phase; there are: terminal, {', '.join(PHASES)}")
    with Client() as client:
        record = client.find(job)
        if record.status.phase != goal:
            until = "it ends" if goal == "terminal" else f"it is {goal}"
            note(f"{record.id} is {record.status.phase}, update {_progress(record)}; waiting until {until}")
        record = client.wait(record.id, goal=goal, timeout_s=timeout)
    if as_json:
        show_json(record)
    else:
        typer.echo(f"{record.id} {record.status.phase} {record.status.message}".strip())
    note_warnings(record)
    raise typer.Exit(result_code(record))


def cancel(
    job: Job,
    force: Annotated[bool, typer.Option("--force", help="Stop without draining or a checkpoint.")] = False,
    checkpoint: Annotated[bool, typer.Option(help="Write a final checkpoint.")] = True,
    as_json: Json = False,
) -> None:
    """End a job. The job first finishes its work in progress and writes a checkpoint."""
    with Client() as client:
        _show(client.cancel(client.find(job).id, force=force, checkpoint=checkpoint), as_json)


def rm(
    job: Job,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Also delete its checkpoint files.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a job that has ended: its ledger, groups, metrics, events and feedback. This cannot be undone."""
    with Client() as client:
        record = client.find(job)
        if not yes:
            what = "all that is known of it, and its checkpoints" if checkpoints else "all that is known of it"
            _ask(f"delete {record.id} ({record.name}, update {record.status.step}): {what}?")
        client.delete(record.id, checkpoints=checkpoints)
    show_done(f"{record.id} ({record.name}) is deleted", {"id": record.id, "deleted": True}, as_json)


def _ask(question: str) -> None:
    """Ask the user for confirmation. Raises ConfigError if standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody can be asked here: repeat it with --yes")
    typer.confirm(question, abort=True, err=True)


def pause(job: Job, as_json: Json = False) -> None:
    """Stop a job after its current update."""
    with Client() as client:
        _show(client.pause(client.find(job).id), as_json)


def resume(job: Job, as_json: Json = False) -> None:
    """Resume a paused job."""
    with Client() as client:
        _show(client.resume(client.find(job).id), as_json)


def scale(
    job: Job,
    wanted: Annotated[str, typer.Argument(metavar="POOL=N", help=f"Like rollout=4; pools: {', '.join(POOLS)}.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait until the workers run.")] = 180,
    as_json: Json = False,
) -> None:
    """Set the number of workers of a service, if 'penstock up' runs it. Surplus workers finish their work first."""
    pool, _, count = wanted.partition("=")
    if pool not in POOLS or not count.isdecimal():
        raise ConfigError(f"'{wanted}' must look like rollout=4; pools: {', '.join(POOLS)}")
    with Client() as client:
        result = client.scale(client.find(job).id, pool, int(count), timeout_s=timeout_s)
    if as_json:
        show_json(result)
    else:
        note(f"{result['ready']} workers of '{pool}' are ready")


def _show(record: JobRecord, as_json: bool) -> None:
    if as_json:
        show_json(record)
    else:
        typer.echo(f"{record.id} is {record.status.phase}, wanted: {record.desired_state}")


def _best(best: dict[str, Any]) -> str:
    return f"{best['path']} ({best['metric']} {number(best['value'])} after update {best['step']})"


def _canary(trial: dict[str, Any]) -> str:
    arms = (f"{trial[f'{arm}conversations']} judged, reward {number(trial[f'{arm}reward'])}" for arm in ("", "served_"))
    its, others = arms
    return f"{trial['version']} answers {trial['share']:.0%} ({its}; others: {others}; {trial['needed']} decide)"


def _phase(record: JobRecord) -> str:
    """Return the phase of a job, followed by the kinds of its active warnings in parentheses."""
    kinds = ", ".join(warning.kind for warning in record.status.warnings)
    return f"{record.status.phase} ({kinds})" if kinds else record.status.phase


def _progress(record: JobRecord) -> str:
    total = record.status.total_steps
    return f"{record.status.step}/{total}" if total else str(record.status.step)
