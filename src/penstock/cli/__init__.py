"""The command line: ``penstock --help``."""

from penstock.cli.app import app, main

__all__ = ["app", "main"]
