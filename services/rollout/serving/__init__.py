"""Live requests of agents, answered by the engine that also answers the job's tickets."""

from penstock.services.rollout.serving.server import InferenceServer

__all__ = ["InferenceServer"]
