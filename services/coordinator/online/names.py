"""By which names interactions and episodes are known. Pure."""

from __future__ import annotations

from penstock.shared.protocol.interaction import Interaction, bare_id

__all__ = ["canonical", "episode_of"]


def canonical(text: str) -> str:
    """An id without its prefix; what is no id stays as it is."""
    return bare_id(text) or text


def episode_of(interaction: Interaction) -> str:
    """The episode of an interaction. A name that an agent made up is one of its key: others may make up the same."""
    return bare_id(interaction.episode) or f"{interaction.key_id} {interaction.episode}"
