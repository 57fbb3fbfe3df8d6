"""Job files: one model per kind of job, and the keys that may change while a job runs."""
