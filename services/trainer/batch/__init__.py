"""Batches before an update: groups are fetched, checked, packed and split into minibatches.

Backends and update rules import this package; within the trainer it imports only `ranks/`.
"""
