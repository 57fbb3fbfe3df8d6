"""Entry point of ``python -m penstock.cli``."""

from penstock.cli.app import main

if __name__ == "__main__":
    main()
