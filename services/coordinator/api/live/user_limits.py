"""Requests of one key for each of its end users, who are counted under their pseudonyms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from penstock.services.coordinator.api.http.ratelimit import RateLimiter
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import HttpProblem

__all__ = ["check_user", "over_limit"]


async def check_user(limiter: RateLimiter, caller: Caller, user: str, pseudonym: Callable[[str], str]) -> None:
    """Count a request for ``user`` ('' for nobody).

    Raises:
        HttpProblem: 429 there were too many.
        Unavailable: users have no pseudonyms yet.
    """
    (refusal,) = await over_limit(limiter, caller, [user], pseudonym)
    if refusal is not None:
        raise refusal


async def over_limit(
    limiter: RateLimiter, caller: Caller, users: Sequence[str], pseudonym: Callable[[str], str]
) -> list[HttpProblem | None]:
    """Count requests or items by the users that they name ('' for nobody): for each its refusal, or None.

    Of each user the first ones pass, as many as may. Who holds the key of an episode or the token for a verdict can
    name anybody: each of them is counted apart, so that nobody uses up what others may send.

    Raises:
        Unavailable: users have no pseudonyms yet.
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
