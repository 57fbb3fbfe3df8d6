"""Trials of environments before a job is submitted: tools of the user, and environments of `verifiers`."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.services.env.verifiers import VerifiersHost
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.errors import ToolError, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.tools import EpisodeState, Step, ToolRequest
from penstock.shared.protocol.trials import Finding, TrialReply, TrialRequest
from penstock.shared.runtime.user_process import run_trial

__all__ = ["try_environment"]

SECTION = "environment"
OPENING = f"{SECTION}.env"


async def try_environment(request: TrialRequest) -> TrialReply:
    """Open the environment of a job and begin one episode, in a process that is killed afterwards.

    Raises:
        Unavailable: the sender no longer waits, or no process can be started.
    """
    section = request.parts[SECTION]
    if section.get("type") != "verifiers":
        return await run_trial("penstock.services.env.tools.trial", request)
    if bus_time() > request.start_by:
        raise Unavailable("nobody waits for this trial any more")
    host = VerifiersHost(VerifiersConfig.model_validate(section))
    try:
        async with asyncio.timeout(request.limit_s):
            findings = await _first_step(host, request.limit_s)
    except TimeoutError:
        text = f"the environment had not begun an episode after {request.limit_s:g} s, when the trial ended"
        findings = [Finding(key=OPENING, text=text, fatal=False)]
    finally:
        await host.close()
    return TrialReply(findings=findings)


async def _first_step(host: VerifiersHost, limit_s: float) -> list[Finding]:
    """Let the environment begin its first task, until it asks for a turn of the policy."""
    try:
        episode = await host.begin(EpisodeState(episode="trial", seed=0))
    except ToolError as error:
        return [Finding(key=OPENING, text=str(error), fatal=True)]
    what = "the first task, tried before a turn of the policy:"
    try:
        reply = await episode.ask(ToolRequest(purpose="begin", arguments={"task": 0}), limit_s)
    except ToolError as error:
        return [Finding(key=OPENING, text=f"{what} {error}", fatal=False)]
    problem = msgspec.json.decode(reply.text, type=Step).error if reply.status == "ok" else reply.text
    return [Finding(key=OPENING, text=f"{what} {problem}", fatal=False)] if problem else []
