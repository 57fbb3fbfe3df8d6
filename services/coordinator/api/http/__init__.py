"""HTTP tools that all routes share: bodies, replies, pages, event streams, files, rate limits and idempotency.

The package imports nothing from the rest of the API.
"""
