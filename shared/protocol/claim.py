"""Claim checks: small references to bytes in the bulk plane."""

from __future__ import annotations

import msgspec

__all__ = ["Claim"]


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Where ``nbytes`` bytes lie until their producer releases them.

    A consumer with the same ``host`` id maps the segment ``name``; any other pulls from ``address`` (``host:port``,
    empty if the producer serves its own host only). ``generation`` tells this content of the segment from what it held
    before and will hold later. ``token`` proves to the server at ``address`` that the claim was given to the consumer.
    ``digest`` is the xxh3-128 of the bytes, or empty if the producer did not compute one.
    """

    host: str
    name: str
    generation: int
    nbytes: int
    digest: str = ""
    address: str = ""
    token: str = ""
