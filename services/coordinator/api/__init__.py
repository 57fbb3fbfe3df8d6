"""The HTTP face of the coordinator: conventions here, decisions behind ``Control``."""

from penstock.services.coordinator.api.app import create_app

__all__ = ["create_app"]
