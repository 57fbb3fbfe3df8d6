"""Penstock: on-policy reinforcement learning for foundation models, as services."""

__version__ = "0.1.0"
