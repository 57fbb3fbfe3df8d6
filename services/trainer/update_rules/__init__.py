"""Update rules: what a batch does to the trained models. The maths is in ``shared.algorithms``."""

from penstock.services.trainer.update_rules.on_policy import NonFiniteStep, OnPolicyRule

__all__ = ["NonFiniteStep", "OnPolicyRule"]
