"""OpenAI's fine-tuning API: conversion of its requests to jobs, and of jobs to its replies.

The folder owns this conversion and its request and reply bodies, and stores nothing: the result of a request is a job
like any other. Callers: the routes of `api/`, through the ``FineTuningService`` of `services`. It uses `submission`,
`files`, `graders`, `origins`, `jobs/`, and the checkpoints of `training/`; it never imports `api/`,
`feedback/`, `online/`, `queries/` or `serving/`.
"""
