"""Routing of live requests from HTTP clients to rollout workers.

The folder owns requests from their arrival to the end of their answers: the table of models, the choice of a worker,
tokens on their way to the client, recovery from lost workers, retries of clients, conversations, and episodes. What
other replicas must know is in the buckets `answers` and `episodes`; rollout workers, not this folder, record
interactions.

Callers: the routes of `api/`, through the ``Gateway`` that `service` creates and keeps running. It uses `jobs/`,
`training/` (the canary's share of conversations), `feedback/` (objections of users), and the modules `payload`
and `shares`; it never imports `api/`, `online/` or `queries/`.
"""

from penstock.services.coordinator.serving.gateway import Gateway

__all__ = ["Gateway"]
