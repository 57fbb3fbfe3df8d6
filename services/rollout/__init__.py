"""Rollout: owns inference engines. Takes tickets, publishes groups; serves the newest committed policy version."""
