"""Entry point of the reward service: ``python -m penstock.services.reward``."""

import gc

if __name__ == "__main__":
    gc.disable()  # passes over new modules would take a third of the time; `run_service` enables it
    from penstock.services.reward.service import RewardService
    from penstock.shared.runtime.service import run_service

    run_service(RewardService)
