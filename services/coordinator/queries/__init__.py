"""Read-only queries about a job for the HTTP API: audit, samples, charts, logs; from ledger, streams and files.

`control.py` calls them. They change nothing, and no other part of the system waits for them.
"""
