"""The leader of a job: reads its streams, decides, writes the ledger and carries the effects out.

The service starts a leader for each job whose lease it has. It imports `training/`, `jobs/` and protocols of `api/`.
"""
