"""Webhooks: job events, posted to users' addresses, signed, in order, at least once."""
