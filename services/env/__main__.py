"""Entry point of the env service: ``python -m penstock.services.env``."""

import gc

if __name__ == "__main__":
    gc.disable()  # passes over new modules would take a third of the time; `run_service` enables it
    from penstock.services.env.service import EnvService
    from penstock.shared.runtime.service import run_service

    run_service(EnvService)
