"""Environments of the library `verifiers`, which runs in a process of its own, in whatever interpreter has it."""

from penstock.services.env.verifiers.host import VerifiersHost

__all__ = ["VerifiersHost"]
