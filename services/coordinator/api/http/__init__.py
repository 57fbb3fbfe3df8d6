"""Tools of every route: bodies, replies, pages, event streams, files, rate limits and idempotency.

It imports nothing else of the API.
"""
