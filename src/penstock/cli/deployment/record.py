"""``penstock record``: records demonstrations for the warm start of an embodied job or for a world model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.cli.printing import Json, note, show_json
from penstock.local.recording import EXPERT_OPTIONS, policy_of_checkpoint, record, scripted_expert
from penstock.services.env.simulators import WORLD_MODEL
from penstock.shared.config.base import load_yaml
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import load_settings
from penstock.shared.data.demonstrations import write_demonstrations
from penstock.shared.errors import ConfigError

__all__ = ["record_demonstrations"]

SAID_EVERY = 50


def record_demonstrations(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Job file (YAML) of kind embodied, which names the simulator.")
    ],
    *,
    to: Annotated[Path | None, typer.Option("--to", help="Default: warm_start.demonstrations of the job file.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 50,
    noise: Annotated[
        float, typer.Option(min=0, max=1, help="Added to continuous actions, as part of their range, but not recorded.")
    ] = 0.0,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Play the policy in this checkpoint, not the scripted expert.")
    ] = None,
    at_random: Annotated[
        bool, typer.Option("--random", help="Sample every action at random, for a world model; keeps all episodes.")
    ] = False,
    hold: Annotated[
        int, typer.Option(min=1, help="With --random: keep each action for 1 to this many steps, to get further.")
    ] = 1,
    every: Annotated[bool, typer.Option("--all", help="Also keep episodes that do not solve the task.")] = False,
    as_json: Json = False,
) -> None:
    """Play episodes from the reset ids of a job, and save them as demonstrations."""
    config = parse_job(load_yaml(file))
    if not isinstance(config, EmbodiedJob):
        raise ConfigError(f"{file}: only jobs of kind 'embodied' have a simulator")
    target = to or (Path(config.warm_start.demonstrations) if config.warm_start is not None else None)
    if target is None:
        raise ConfigError(f"{file} has no warm_start.demonstrations: say with --to where they go")
    if at_random and (noise or checkpoint is not None):
        raise ConfigError("--random acts by itself: leave --noise and --checkpoint out")
    if hold > 1 and not at_random:
        raise ConfigError("--hold keeps random actions: add --random")
    sim = config.environment
    played = config.held_out_simulator if sim.backend == WORLD_MODEL else sim  # the real simulator
    scripted = checkpoint is None and not at_random
    options = played.options | (EXPERT_OPTIONS.get(played.backend, {}) if scripted else {})
    found = record(
        msgspec.structs.replace(played.opening(1), options=options),
        load_settings().sims_dir.expanduser(),
        scripted_expert if scripted else None if checkpoint is None else partial(policy_of_checkpoint, checkpoint),
        reset_ids=[sim.reset_id(ordinal) for ordinal in range(episodes)],
        horizon=sim.horizon, noise=noise, hold=hold, only_solved=not (every or at_random),
        source="scripted expert" if scripted else str(checkpoint or "chance"),
        on_episode=lambda count: note(f"{count} of {episodes} episodes") if count % SAID_EVERY == 0 else None,
    )  # fmt: skip
    write_demonstrations(target, found)
    if as_json:
        show_json({"path": str(target), "episodes": found.num_episodes, "steps": len(found), **found.about})
    else:
        note(f"{target}: {found.num_episodes} of {episodes} episodes, {len(found)} steps")
