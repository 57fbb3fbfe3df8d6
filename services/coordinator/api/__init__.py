"""HTTP API of the coordinator: routes and their conventions. The routes call services, which make the decisions."""

from penstock.services.coordinator.api.app import create_app

__all__ = ["create_app"]
