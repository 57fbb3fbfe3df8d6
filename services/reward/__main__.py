"""Entry point of the reward service: ``python -m penstock.services.reward``."""

from penstock.services.reward.service import RewardService
from penstock.shared.runtime.service import run_service

if __name__ == "__main__":
    run_service(RewardService)
