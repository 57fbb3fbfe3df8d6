"""Feedback on live interactions: stored durably, indexed, and deleted on request."""
