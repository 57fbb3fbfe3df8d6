"""Webhooks: signed job events that the coordinator posts to users' addresses, in order and at least once."""
