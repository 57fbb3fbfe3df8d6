# ruff: noqa: N999
"""Stub of IPython, which SGLang imports to display results in notebooks."""

from absent import absent_modules

absent_modules(__name__, "display")
