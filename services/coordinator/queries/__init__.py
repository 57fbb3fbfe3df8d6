"""Answers to questions about a job: books, samples, charts, logs. Each is read from ledger, streams and files.

`control.py` calls it for the HTTP API. It changes nothing, and nobody but the API waits for it.
"""
