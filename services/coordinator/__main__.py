"""``python -m penstock.services.coordinator``."""

from penstock.services.coordinator.service import CoordinatorService
from penstock.shared.runtime.service import run_service

if __name__ == "__main__":
    run_service(CoordinatorService)
