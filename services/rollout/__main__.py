"""Entry point of the rollout service: ``python -m penstock.services.rollout``."""

import gc

if __name__ == "__main__":
    gc.disable()  # passes over new modules would take a third of the time; `run_service` enables it
    from penstock.services.rollout.service import RolloutService
    from penstock.shared.runtime.service import run_service

    run_service(RolloutService)
