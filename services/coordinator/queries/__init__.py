"""Read-only services of the HTTP API: diagnosis, samples, charts of a job, and health; from ledger, streams and files.

They change nothing, and no other part of the system waits for them.
"""
