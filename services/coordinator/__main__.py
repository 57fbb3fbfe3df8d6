"""Entry point of the coordinator service: ``python -m penstock.services.coordinator``."""

import gc

if __name__ == "__main__":
    gc.disable()  # passes over new modules would take a third of the time; `run_service` enables it
    from penstock.services.coordinator.service import CoordinatorService
    from penstock.shared.runtime.service import run_service

    run_service(CoordinatorService)
