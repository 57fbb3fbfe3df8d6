"""Live requests of agents on their way between HTTP and the rollout workers."""

from penstock.services.coordinator.serving.gateway import Gateway

__all__ = ["Gateway"]
