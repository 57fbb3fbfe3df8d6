"""Claim checks: messages carry these small references instead of large data. The bytes themselves travel in the bulk
plane, outside NATS: through shared memory or a TCP connection.
"""

from __future__ import annotations

import msgspec

__all__ = ["Claim"]


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Reference to ``nbytes`` bytes that stay available until their producer releases them.

    A consumer with the same ``host`` id maps the segment ``name``; others pull from ``address`` (``host:port``, empty
    if the producer serves only its own host). ``generation`` distinguishes this content of the segment from earlier and
    later ones. ``token`` proves to the server at ``address`` that the consumer received the claim. ``digest`` is the
    xxh3-128 of the bytes, or empty if the producer did not compute one.
    """

    host: str
    name: str
    generation: int
    nbytes: int
    digest: str = ""
    address: str = ""
    token: str = ""
