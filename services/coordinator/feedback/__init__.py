"""Feedback on live interactions: taken durably, indexed, and forgotten on demand."""
