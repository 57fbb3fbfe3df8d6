"""HTTP API of the coordinator: routes and their conventions. The routes call services, which make the decisions.

The folder owns everything that only HTTP needs: bodies and replies, authorisation by keys and scopes, limits of
requests, idempotency, event streams, the OpenAPI document, and the delivery of the dashboard's files.

Callers: `service` serves ``create_app``; `webserver` uses limits and problem replies; nothing else of the coordinator
imports it. It may import every other folder, and reaches `leader/`, `queries/`, `submission` and `steering` only
through `services`; `online/` and `training/` it does not use.
"""

from penstock.services.coordinator.api.app import create_app

__all__ = ["create_app"]
