"""Ranks of a job: process groups, orders to ranks, liveness, and the division of rows and groups over ranks.

Batches, backends and update rules import this package; it imports nothing else of the trainer.
"""
