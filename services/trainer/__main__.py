"""Entry point of the trainer service: ``python -m penstock.services.trainer``."""

from penstock.services.trainer.service import TrainerService
from penstock.shared.runtime.service import run_service

if __name__ == "__main__":
    run_service(TrainerService)
