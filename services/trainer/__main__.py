"""Entry point of the trainer service: ``python -m penstock.services.trainer``."""

import gc

if __name__ == "__main__":
    gc.disable()  # passes over new modules would take a third of the time; `run_service` enables it
    from penstock.services.trainer.service import TrainerService
    from penstock.shared.runtime.service import run_service

    run_service(TrainerService)
