"""Read-only services of the HTTP API: diagnosis, samples, charts of a job, and health. They read the ledger, streams
and files.

They change no job, and no other part of the system waits for them. They write two things: the health check a test entry
that expires, and a replay a request to a trainer, which repeats batches beside the job. Only `services` imports this
folder, and hands it to the routes. It may import every folder but `api/`, and uses `jobs/`, `training/`, `online/` (to
check admissions by its rules) and `leader/` (to ask a job's leader).
"""
