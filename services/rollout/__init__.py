"""The rollout service: owns inference engines, answers tickets with groups, serves the newest committed version."""
