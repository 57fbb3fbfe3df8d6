"""The leader of a job: reads its streams, decides, writes the ledger and publishes the effects of its decisions.

The leading coordinator starts one leader per job. This package imports `training/`, `jobs/` and protocols of `api/`.
"""
