"""Environments of the library `verifiers`, run in a separate process by any interpreter that has the library."""

from penstock.services.env.verifiers.host import VerifiersHost, try_verifiers

__all__ = ["VerifiersHost", "try_verifiers"]
