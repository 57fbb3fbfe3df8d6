"""Episodes of live agents, for both clients: ``client.episodes``. Needs the scope ``episodes:write``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from penstock.client.calls import Call, make
from penstock.client.flows import rows
from penstock.client.results import Episode, EpisodeKey, Interaction, NewEpisode
from penstock.client.results.reading import one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends

__all__ = ["AsyncEpisodes", "Episodes"]


def _open(
    model: str,
    *,
    ttl_s: float | None = None,
    split: Literal["train", "val"] | None = None,
    group_id: str | None = None,
    user: str | None = None,
    tags: Mapping[str, str] | None = None,
    key: Mapping[str, Any] | None = None,
) -> Call[NewEpisode]:
    """Open an episode: requests to its ``base_url`` are its turns.

    Args:
        model: name or id of a job.
        ttl_s: seconds for which requests are taken; default: a day.
        split: `val` is recorded and never trained on.
        group_id: episodes of one group are compared with each other.
        user: whose requests these are where they name nobody.
        key: make a key for it alone, too, with `expires_in_s` and `scopes` as ``key`` has them: `{}` for the defaults.
    """
    named = None if tags is None else dict(tags)
    made = None if key is None else dict(key)
    about = {"ttl_s": ttl_s, "split": split, "group_id": group_id, "user": user, "tags": named, "key": made}
    return make("/v1/episodes", one(NewEpisode), model=model, **about)


def _list(model: str, *, limit: int = 100) -> Steps[list[Episode]]:
    """Up to ``limit`` episodes of a model that were opened, oldest first."""
    return (yield from rows(Episode, "/v1/episodes", "id", limit, model=model))


def _show(id: str) -> Call[Episode]:
    """One of them. Raises NotFound."""
    return Call("GET", _path(id), one(Episode))


def _end(id: str) -> Call[Episode]:
    """End an episode: it takes no more requests, and its turns are credited. Safe to repeat. Raises NotFound."""
    return Call("POST", f"{_path(id)}/end", one(Episode))


def _key(
    id: str,
    *,
    expires_in_s: float | None = None,
    scopes: Sequence[Literal["inference:write", "feedback:write"]] | None = None,
) -> Call[EpisodeKey]:
    """Make a key for this episode alone (default: for an hour), for a browser or an agent that should hold no other.

    After a reply that was lost another key is made; both end with their time. Raises NotFound.
    """
    wanted = None if scopes is None else list(scopes)
    return make(f"{_path(id)}/keys", one(EpisodeKey), expires_in_s=expires_in_s, scopes=wanted)


def _interactions(id: str, *, limit: int = 100) -> Steps[list[Interaction]]:
    """Up to ``limit`` interactions of an episode, as they were recorded; also of one that nobody opened.

    Needs the scope ``jobs:read``. Raises NotFound: it is not the id of an episode.
    """
    return (yield from rows(Interaction, f"{_path(id)}/interactions", "id", limit))


def _path(id: str) -> str:
    return f"/v1/episodes/{quote(id, safe='')}"


class Episodes:
    """``open``, ``list``, ``show`` and ``end`` episodes; make a ``key`` for one; its ``interactions``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    open = sends(_open)
    list = runs(_list)
    show = sends(_show)
    end = sends(_end)
    key = sends(_key)
    interactions = runs(_interactions)


class AsyncEpisodes:
    """``open``, ``list``, ``show`` and ``end`` episodes; make a ``key`` for one; its ``interactions``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    open = awaits(_open)
    list = awaits_all(_list)
    show = awaits(_show)
    end = awaits(_end)
    key = awaits(_key)
    interactions = awaits_all(_interactions)
