"""Update rules, which define how a batch changes the trained models. The maths is in ``shared.algorithms``."""

from penstock.services.trainer.update_rules.on_policy import NonFiniteStep, OnPolicyRule

__all__ = ["NonFiniteStep", "OnPolicyRule"]
