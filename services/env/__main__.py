"""Entry point of the env service: ``python -m penstock.services.env``."""

from penstock.services.env.service import EnvService
from penstock.shared.runtime.service import run_service

if __name__ == "__main__":
    run_service(EnvService)
