"""Rate limits for the end users of one key, who are counted under their pseudonyms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from penstock.services.coordinator.api.http.ratelimit import RateLimiter
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import HttpProblem

__all__ = ["check_user", "over_limit"]


async def check_user(limiter: RateLimiter, caller: Caller, user: str, pseudonym: Callable[[str], str]) -> None:
    """Count a request of the end user ``user`` ('' for none) against the limit for users.

    Raises:
        HttpProblem: 429 the user is beyond the limit.
        Unavailable: pseudonyms are not available yet.
    """
    (refusal,) = await over_limit(limiter, caller, [user], pseudonym)
    if refusal is not None:
        raise refusal


async def over_limit(
    limiter: RateLimiter, caller: Caller, users: Sequence[str], pseudonym: Callable[[str], str]
) -> list[HttpProblem | None]:
    """Count one request or item for each entry of ``users`` ('' for no user); return for each entry None if it passes,
    or else its refusal.

    The first items of each user pass, up to the limit. The bearer of an episode key or a feedback token can name any
    user, so each such bearer is counted separately and cannot use up the limits of others.

    Raises:
        Unavailable: pseudonyms are not available yet.
    """
    refusals: list[HttpProblem | None] = [None] * len(users)
    if not limiter.limits_users:
        return refusals
    for user, number in Counter(filter(None, users)).items():
        found = await limiter.take_user(caller.sender, pseudonym(user), number)
        if found is None or found.allowed:
            continue
        places = [place for place, named in enumerate(users) if named == user]
        for place in places[found.granted :]:
            refusals[place] = found.refusal("user_rate_limited", "of this user")
    return refusals
