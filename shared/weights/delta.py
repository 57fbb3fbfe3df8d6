"""Deltas between two versions of the same bytes: encoding and application.

A delta holds new values, not differences, so that applying it gives the bits of the later version, whatever they mean.
Both versions are read as words of 16 bits: one word for an element of bfloat16 or float16, two for one of float32.

::

    u32 number of changed words | their new values, u16 each | gaps, u8 each

A gap below 255 is the number of unchanged words before the next changed word; 255 stands for 255 unchanged words that
no changed word follows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import WeightsError

__all__ = ["BUCKET_BYTES", "MAX_SHARE", "apply", "encode"]

BUCKET_BYTES = 16 << 20
"""Bytes of a version whose changes travel as one delta; a multiple of the alignment of tensors."""
MAX_SHARE = 0.25
"""Largest share of changed words in a delta. Such a delta has less than two fifths of the bytes that it describes."""
_HEAD_BYTES = 4
_LONG = 255


def encode(previous: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Return the delta from ``previous`` to ``new``, uint8 [bytes] each; None if more than ``MAX_SHARE`` of the words
    changed.

    The number of bytes is even. From 8 bytes on, a delta is shorter than ``new``.
    """
    words = new.view(np.uint16)
    changed = words != previous.view(np.uint16)
    num_changed = int(np.count_nonzero(changed))
    if num_changed > MAX_SHARE * len(words):
        return None
    positions = np.flatnonzero(changed)
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _LONG + 1)
    values_end = _HEAD_BYTES + 2 * num_changed
    delta = np.full(values_end + (int(ends[-1]) if num_changed else 0), _LONG, np.uint8)
    delta[:_HEAD_BYTES].view(np.uint32)[0] = num_changed
    delta[_HEAD_BYTES:values_end].view(np.uint16)[:] = words[positions]
    delta[values_end:][ends - 1] = gaps % _LONG
    return delta


def apply(base: NDArray[np.uint8], delta: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Copy ``base``, uint8 [bytes], to ``target`` and apply ``delta`` there.

    Raises:
        WeightsError: the delta is damaged, or of other bytes.
    """
    np.copyto(target, base)
    words = target.view(np.uint16)
    num_changed = int.from_bytes(delta[:_HEAD_BYTES].tobytes(), "little")
    values_end = _HEAD_BYTES + 2 * num_changed
    gaps = delta[values_end:]
    followed = gaps != _LONG
    positions = np.cumsum(gaps + followed, dtype=np.int64)[followed] - 1
    if len(delta) < values_end or len(positions) != num_changed or (num_changed and positions[-1] >= len(words)):
        raise WeightsError(f"a delta of {len(delta)} bytes does not fit {len(target)} bytes of weights")
    words[positions] = delta[_HEAD_BYTES:values_end].view(np.uint16)
