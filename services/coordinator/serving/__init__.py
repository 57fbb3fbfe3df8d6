"""Routing of live requests from HTTP clients to rollout workers."""

from penstock.services.coordinator.serving.gateway import Gateway

__all__ = ["Gateway"]
