"""A job continues after its bus had no disk space for a while, because another file filled the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

MIB = 1 << 20
SIZES = {"PENSTOCK_EXPERIENCE_BYTES": str(32 * MIB), "PENSTOCK_STREAM_BYTES": str(4 * MIB)}


def test_a_job_goes_on_once_there_is_room(
    deploy: Callable[[Path], Any], disk: Callable[..., Path], fill: Callable[[Path], Path], tmp_path: Path
) -> None:
    deployment = deploy(tmp_path / "stack")
    deployment.environment.update(SIZES)
    folder = disk(160, tmp_path / "stack" / "data" / "nats")
    with deployment:
        url = f"{deployment.stack.url}/readyz"
        job = deployment.submit("train.max_updates=100")
        deployment.reach(job, 3)
        ballast = fill(folder)
        deployment.until(lambda: "no space left on device" in httpx.get(url).text, "the coordinator says what is wrong")
        assert httpx.get(url).status_code == 503
        time.sleep(2)
        step = deployment.status(job).step
        ballast.unlink()
        assert deployment.finish(job, 150).status.phase == "succeeded"
        assert step < 100, "the job had not ended"
        deployment.until(lambda: httpx.get(url).is_success, "the coordinator is ready")
        deployment.check_audit(job)
        deployment.check_replay(job, 1)
        assert any("there is room; starting it again" in line for line in deployment.messages)
