"""Videos of held-out episodes in the stream VIDEOS: each message has an MP4 file as data, and its metadata in one
header."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.shared.errors import ProtocolError

__all__ = ["Video", "parse_video", "video_headers"]

HEADER = "Penstock-Video"


class Video(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of one video.

    Attributes:
        name: name of the file, `VERSION-RESET_ID.mp4`.
        version: version of the policy that acted, with its mean actions.
        reset_id: id of the initial state; task: description of the task, or ''.
        success: the simulator reported at some step that the task is solved.
        total: undiscounted return; steps: executed actions.
        error: reason why there is no film (the data are then empty); '' if there is one.
    """

    name: str
    version: int
    reset_id: int
    task: str = ""
    success: bool = False
    total: float = 0.0
    steps: int = 0
    error: str = ""


def video_headers(video: Video) -> dict[str, str]:
    """Return the headers of the message that carries the video with this metadata."""
    return {HEADER: msgspec.json.encode(video).decode("ascii", "replace")}


def parse_video(headers: Mapping[str, str]) -> Video:
    """Inverse of ``video_headers``. Raises ProtocolError."""
    try:
        return msgspec.json.decode(headers.get(HEADER, ""), type=Video)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"header {HEADER} describes no video: {error}") from None
