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
        ttl_s: seconds for which the episode accepts requests; default: a day.
        split: `val` is recorded and never trained on.
        group_id: episodes of one group are compared with each other.
        user: user of those requests that name no user.
        key: also create a key for this episode, with these arguments of the method ``key``; None: no key.
    """
    named = None if tags is None else dict(tags)
    made = None if key is None else dict(key)
    about = {"ttl_s": ttl_s, "split": split, "group_id": group_id, "user": user, "tags": named, "key": made}
    return make("/v1/episodes", one(NewEpisode), model=model, **about)


def _list(model: str, *, limit: int = 100) -> Steps[list[Episode]]:
    """List up to ``limit`` opened episodes of a model, oldest first."""
    return (yield from rows(Episode, "/v1/episodes", "id", limit, model=model))


def _show(id: str) -> Call[Episode]:
    """Show an episode. Raises NotFound."""
    return Call("GET", _path(id), one(Episode))


def _end(id: str) -> Call[Episode]:
    """End an episode. It then refuses requests, and the coordinator assigns credit to its turns. Safe to repeat.

    Raises NotFound.
    """
    return Call("POST", f"{_path(id)}/end", one(Episode))


def _key(
    id: str,
    *,
    expires_in_s: float | None = None,
    scopes: Sequence[Literal["inference:write", "feedback:write"]] | None = None,
) -> Call[EpisodeKey]:
    """Create a key for this episode only (default: for an hour), for a browser or agent that should hold no other key.

    A retry after a lost reply creates another key; both expire. Raises NotFound.
    """
    wanted = None if scopes is None else list(scopes)
    return make(f"{_path(id)}/keys", one(EpisodeKey), expires_in_s=expires_in_s, scopes=wanted)


def _interactions(id: str, *, limit: int = 100) -> Steps[list[Interaction]]:
    """List up to ``limit`` interactions of an episode, in recording order. The episode need not be created by ``open``.

    Needs the scope ``jobs:read``. Raises NotFound: not the id of an episode.
    """
    return (yield from rows(Interaction, f"{_path(id)}/interactions", "id", limit))


def _path(id: str) -> str:
    return f"/v1/episodes/{quote(id, safe='')}"


class Episodes:
    """Episodes: ``open``, ``list``, ``show`` and ``end`` them; ``key`` and ``interactions`` of a single episode."""

    def __init__(self, send: Send) -> None:
        self._send = send

    open = sends(_open)
    list = runs(_list)
    show = sends(_show)
    end = sends(_end)
    key = sends(_key)
    interactions = runs(_interactions)


class AsyncEpisodes:
    """Episodes: ``open``, ``list``, ``show`` and ``end`` them; ``key`` and ``interactions`` of a single episode."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    open = awaits(_open)
    list = awaits_all(_list)
    show = awaits(_show)
    end = awaits(_end)
    key = awaits(_key)
    interactions = awaits_all(_interactions)
