"""A batch on its way into an update: groups are fetched, checked, packed and cut into minibatches.

Backends and update rules import it; of the trainer it imports `ranks/` alone.
"""
