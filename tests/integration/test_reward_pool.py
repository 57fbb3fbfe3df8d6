"""The scorer pool against scorers that work, raise, hang, crash, print and lie. Real processes throughout."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.services.reward.pool import ScorerPool
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.protocol.messages import JUDGEMENTS, ScoreRequest

USER_CODE = """
import ctypes, os, subprocess, sys, time

def by_word(prompt, completion, answer, row, **args):
    print("user code prints", completion)
    os.write(1, b"and writes to descriptor 1")
    if completion == "hang":
        while True:
            time.sleep(0.01)
    if completion == "hang and start children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(args["pids"], "w").write(str(child.pid))
        time.sleep(60)
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(7)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion.startswith("slow"):
        time.sleep(0.3)
    returns = {"nan": float("nan"), "inf": 1e400, "none": None, "text": "1.0", "true": True, "list": [1.0],
               "pid": os.getpid(), "slow pid": os.getpid(), "row": row.get("k"), "args": args.get("bonus")}
    return returns.get(completion, 0.5)

not_callable = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_scorers.py").write_text(USER_CODE)
    (tmp_path / "broken_scorers.py").write_text("raise ValueError('broken at import')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def function(name: str = "user_scorers:by_word", **spec: Any) -> dict[str, Any]:
    return {"type": "function", "path": name, **spec}


@asynccontextmanager
async def open_pool(*scorers: dict[str, Any], num_processes: int = 1, **config: Any) -> AsyncIterator[ScorerPool]:
    pool = ScorerPool(RewardConfig.parse({"scorers": list(scorers), **config}), num_processes)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def ask(*completions: str, answer: str | None = "4", row: dict[str, Any] | None = None) -> ScoreRequest:
    return ScoreRequest(prompt="2+2=", completions=list(completions), answer=answer, row=row or {})


async def test_weighted_sum_and_parts() -> None:
    exact, style = (
        {"type": "exact", "weight": 2.0},
        {"type": "format", "pattern": r"\s*\d", "weight": -0.5, "name": "style"},
    )
    async with open_pool(exact, style, {"type": "exact", "ignore_case": True}) as pool:
        reply = await pool.score(ask("4", " 4 ", "5", ""))
    assert reply.rewards == [2.5, 3.0, -0.5, 0.0]
    assert reply.parts == {"exact": [1, 1, 0, 0], "style": [1, 0, 1, 0], "exact_2": [1, 1, 0, 0]}
    assert reply.failed == [False] * 4
    assert reply.errors == []


async def test_math() -> None:
    async with open_pool({"type": "math"}) as pool:
        reply = await pool.score(
            ask("so 18", "\\boxed{36/2}", "19", "no idea", "#### 18.0", answer="9 * 2 = 18\n#### 18")
        )
        assert reply.rewards == [1, 1, 0, 0, 1]
        unreadable = await pool.score(ask("18", answer="eighteen"))
    assert unreadable.failed == [True]
    assert "finds no number or expression in the reference answer 'eighteen'" in unreadable.errors[0]


BAD = {
    "raise": r"scorer 'function' raised KeyError: 'no such thing' \(.*user_scorers\.py, line \d+\)",
    "exit": "raised SystemExit: 3",
    "nan": "returned nan; it must return a finite number",
    "inf": "returned inf; it must return a finite number",
    "none": "returned a NoneType; it must return a number",
    "text": "returned a str; it must return a number",
    "list": "returned a list; it must return a number",
}


async def test_bad_scorers_fail_one_completion_only(user_module: Path) -> None:
    async with open_pool(function()) as pool:
        reply = await pool.score(ask("pid", *BAD, "pid", "true"))
    assert reply.failed == [False, *[True] * len(BAD), False, False]
    assert reply.rewards[0] == reply.rewards[-2] > 0, "the process is not replaced for an exception"
    assert reply.rewards[1:-2] == [0.0] * len(BAD)
    for number, (message, error) in enumerate(zip(BAD.values(), reply.errors, strict=True), start=1):
        assert re.search(f"completion {number}: .*{message}", error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("hang", "took longer than reward.timeout_s (0.5 s) and was killed"),
        ("die", "exited with status 7"),
        ("segfault", "died of signal SIGSEGV"),
    ],
)
async def test_hung_or_crashed_process_is_replaced(user_module: Path, completion: str, message: str) -> None:
    async with open_pool(function(), timeout_s=0.5) as pool:
        reply = await pool.score(ask("pid", completion, "pid", "true"))
        again = await pool.score(ask("pid"))
    assert reply.failed == [False, True, False, False]
    assert message in reply.errors[0]
    old, new = reply.rewards[0], reply.rewards[2]
    assert old != new == again.rewards[0]
    assert reply.rewards[3] == 1.0
    with pytest.raises(ProcessLookupError):
        os.kill(int(old), 0)


@pytest.mark.long
async def test_judgements_of_an_environment_belong_to_their_completion(user_module: Path) -> None:
    judged = {"type": "environment", "weight": 2.0}
    async with open_pool(judged, function(weight=0.0), timeout_s=0.5) as pool:
        reply = await pool.score(ask("a", "die", "b", "c", row={JUDGEMENTS: [0.25, 0.5, 0.75, float("nan")]}))
        without = await pool.score(ask("a"))
    assert reply.rewards == [0.5, 0.0, 1.5, 0.0]
    assert reply.failed == [False, True, False, True]
    assert without.failed == [True]
    assert "no environment has judged" in without.errors[0]


@pytest.mark.long
async def test_limit_counts_from_the_start_of_each_completion(user_module: Path) -> None:
    """Four completions of 0.3 s each under a limit of 0.5 s all succeed, though the group takes 1.2 s."""
    async with open_pool(function(), timeout_s=0.5) as pool:
        started = time.monotonic()
        reply = await pool.score(ask(*["slow"] * 4))
        assert time.monotonic() - started > 1.1
        assert reply.failed == [False] * 4
        started = time.monotonic()
        reply = await pool.score(ask("4", "hang"))
        assert 0.45 < time.monotonic() - started < 30
    assert reply.failed == [False, True]


@pytest.mark.long
async def test_lagging_event_loop_is_not_a_timeout(user_module: Path) -> None:
    async with open_pool(function(), timeout_s=0.4) as pool:
        task = asyncio.create_task(pool.score(ask("slow", "4", "slow")))
        await asyncio.sleep(0.05)
        time.sleep(0.8)  # noqa: ASYNC251  the lag under test: results wait in the socket meanwhile
        reply = await task
    assert reply.failed == [False] * 3


@pytest.mark.long
async def test_killing_takes_children_of_user_code_along(user_module: Path) -> None:
    pids = user_module / "pids"
    async with open_pool(function(args={"pids": str(pids)}), timeout_s=1.0) as pool:
        reply = await pool.score(ask("hang and start children"))
    assert reply.failed == [True]
    await eventually(lambda: not Path(f"/proc/{pids.read_text()}").exists() or "Z" in state(int(pids.read_text())))


def state(pid: int) -> str:
    """Return the state letter of a process; Z means that it has ended and its parent has not waited for it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_process_that_died_while_idle_costs_nothing(user_module: Path) -> None:
    async with open_pool(function()) as pool:
        pid = int((await pool.score(ask("pid"))).rewards[0])
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not Path(f"/proc/{pid}").exists())
        await asyncio.sleep(0.05)
        reply = await pool.score(ask("pid"))
    assert reply.failed == [False]
    assert reply.rewards[0] != pid


@pytest.mark.long
async def test_cancelled_group_frees_its_slot(user_module: Path) -> None:
    async with open_pool(function(), timeout_s=30) as pool:
        pid = int((await pool.score(ask("pid"))).rewards[0])
        task = asyncio.create_task(pool.score(ask("hang")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reply = await pool.score(ask("pid"))
    assert reply.failed == [False]
    assert reply.rewards[0] != pid


async def test_function_sees_row_and_arguments(user_module: Path) -> None:
    async with open_pool(function(args={"bonus": 1.5})) as pool:
        reply = await pool.score(ask("row", "args", row={"k": 0.25}))
    assert reply.rewards == [0.25, 1.5]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:score", "scorer function 'no_such_module:score' cannot be imported: No module named"),
        ("user_scorers:nothing", "has no attribute 'nothing'"),
        ("user_scorers:not_callable", "is a int, not a function"),
        ("broken_scorers:score", "opening scorer 'function' raised ValueError: broken at import"),
    ],
)
async def test_scorer_that_cannot_be_opened_fails_every_request_with_the_reason(
    user_module: Path, path: str, message: str
) -> None:
    async with open_pool(function(path)) as pool:
        assert pool.refused is not None
        assert message in pool.refused.error
        tried = pool.refused.tried
        reply = await pool.score(ask("4", "5"))
        assert pool.refused.tried == tried, "the refusal is stored, and no process is started again"
    assert reply.failed == [True, True]
    assert reply.rewards == [0.0, 0.0]
    assert all(message in error for error in reply.errors)


async def test_missing_answer_is_a_failure_not_a_zero() -> None:
    async with open_pool({"type": "exact"}) as pool:
        reply = await pool.score(ask("4", answer=None))
    assert reply.failed == [True]
    assert "needs a reference answer" in reply.errors[0]


async def test_infinite_sum_is_a_failure(user_module: Path) -> None:
    async with open_pool(function(args={"bonus": 1e308}, weight=10.0)) as pool:
        reply = await pool.score(ask("args"))
    assert reply.failed == [True]
    assert reply.rewards == [0.0]


@pytest.mark.long
async def test_processes_work_side_by_side(user_module: Path) -> None:
    async with open_pool(function(), num_processes=2, slow=True) as pool:
        reply = await pool.score(ask(*["slow pid"] * 4))
    assert reply.failed == [False] * 4
    assert len(set(reply.rewards)) == 2


async def test_a_group_of_exact_scores_is_cheap() -> None:
    async with open_pool({"type": "exact"}) as pool:
        request = ask(*"12345678")
        for _ in range(50):
            await pool.score(request)
        started = time.process_time()
        for _ in range(300):
            await pool.score(request)
        cost_s = (time.process_time() - started) / 300
    assert cost_s < 1.0e-3, f"{cost_s * 1e6:.0f} us of CPU time for a group of 8"


@pytest.mark.long
def test_services_run_on_uvloop(user_module: Path) -> None:
    async def hang_on_uvloop() -> list[bool]:
        async with open_pool(function(), timeout_s=0.5) as pool:
            reply = await pool.score(ask("4", "hang", "die", "4"))
            return reply.failed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(hang_on_uvloop()) == [False, True, True, False]


async def test_empty_group() -> None:
    async with open_pool({"type": "exact"}) as pool:
        assert (await pool.score(ask())).rewards == []
