"""Learns from live data: turns interactions and feedback into the admissions, groups and batches of online jobs.

The folder owns everything between the streams INTERACTIONS and FEEDBACK and the ledger's admissions: undecided episodes
and feedback, rewards and credit, quarantine, shares of keys and users, canary samples, and the groups of admitted
draws. The ledger records every decision: admissions, and interactions and feedback that end without training. The feed
DECISIONS is derived from the ledger.

Callers: ``service`` gives each leader of an online job a ``LiveSupply``, which the runner drives through the protocol
``training.supply.Supply``; ``queries`` checks and replays admissions. Allowed imports: ``shared``, ``training``,
``payload``, ``leader`` for the rows of ``why``, and ``feedback`` for consent and deletions; never ``api`` or
``serving``. A module marked Pure reads neither the bus nor a clock.

The docstring of ``episode`` shows the life cycle of an episode, served or posted. A single posted interaction, a
correction, a demonstration and a preference take the same path, each as one example.
"""
