"""HTTP API of the coordinator: the routes and their conventions. The services that they call take the decisions."""

from penstock.services.coordinator.api.app import create_app

__all__ = ["create_app"]
