"""The HTTP face of the coordinator: conventions and routes here, decisions in the services that they call."""

from penstock.services.coordinator.api.app import create_app

__all__ = ["create_app"]
