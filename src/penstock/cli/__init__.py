"""Command line of Penstock: ``penstock --help``."""

from penstock.cli.app import app, main

__all__ = ["app", "main"]
