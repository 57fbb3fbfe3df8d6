"""HTTP tools that all routes share: bodies, replies, event streams, files, limits and idempotency.

The package imports nothing from the rest of the API.
"""
