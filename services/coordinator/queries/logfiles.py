"""Log files of the services, ``<data_dir>/logs/<service>-<worker>.log``.

The supervisor of a machine writes these files. With ``PENSTOCK_LOG_FILES`` the services write them, on a volume that
they share with the coordinator.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from penstock.shared.errors import NotFound

__all__ = ["read_logs"]

MAX_READ_BYTES = 1 << 20
"""Maximum number of bytes read from one file per call."""
_JOB_ID = re.compile(r"job_[0-9a-f]{32}", re.ASCII)


def read_logs(
    directory: Path, *, job: str, service: str | None, tail: int, after: str | None, unnamed: bool = True
) -> dict[str, Any]:
    """Return ``{"lines": [{"service", "worker", "text"}], "next": cursor}``.

    The lines are the last ``tail`` ones of each file, or those past the cursor ``after``. Lines that name only other
    jobs are skipped, and without ``unnamed`` also lines that name no job. Files are read one after the other; a
    truncated file is read from its start. Blocks on the disk: call it in a thread.

    Raises:
        NotFound: no log of ``service`` (a service or one worker).
    """
    paths = [path for path in sorted(directory.glob("*.log")) if service in (None, path.stem, _service(path))]
    if not paths:
        known = ", ".join(sorted(path.stem for path in directory.glob("*.log"))) or "none"
        raise NotFound(
            f"no log of '{service or 'any service'}' in {directory} of the coordinator; there are: {known}. "
            "A service writes there with PENSTOCK_LOG_FILES=1 and the same PENSTOCK_DATA_DIR"
        )
    seen = _parse_cursor(after)
    lines: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    tail_from = -tail if after is None else 0  # with a cursor, all new lines are returned
    for path in paths:
        texts, places[path.stem] = _read(path, seen.get(path.stem), fresh=after is None)
        wanted = [text for text in texts if _concerns(text, job, unnamed=unnamed)]
        lines += [{"service": _service(path), "worker": path.stem, "text": text} for text in wanted[tail_from:]]
    return {"lines": lines, "next": ",".join(f"{name}:{place}" for name, place in places.items())}


def _service(path: Path) -> str:
    return path.stem.partition("-")[0]


def _read(path: Path, place: int | None, *, fresh: bool) -> tuple[list[str], int]:
    """Return the complete lines of a file from byte ``place`` on (if ``fresh``, the lines at its end), and the position
    after the last of them."""
    size = path.stat().st_size
    start = place if place is not None and place <= size else 0
    if fresh:
        start = max(0, size - MAX_READ_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(MAX_READ_BYTES)
    end = data.rfind(b"\n") + 1
    if fresh and start:  # the first line is incomplete
        cut = data.find(b"\n") + 1
        return data[cut:end].decode("utf-8", "replace").splitlines(), start + end
    return data[:end].decode("utf-8", "replace").splitlines(), start + end


def _parse_cursor(cursor: str | None) -> dict[str, int]:
    places = {}
    for part in (cursor or "").split(","):
        name, _, place = part.partition(":")
        if place.isascii() and place.isdigit():
            places[name] = int(place)
    return places


def _concerns(text: str, job: str, *, unnamed: bool) -> bool:
    named = _JOB_ID.findall(text)
    return job in named if named else unnamed
