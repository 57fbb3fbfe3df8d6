"""Entry point of the rollout service: ``python -m penstock.services.rollout``."""

from penstock.services.rollout.service import RolloutService
from penstock.shared.runtime.service import run_service

if __name__ == "__main__":
    run_service(RolloutService)
