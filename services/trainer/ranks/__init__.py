"""Ranks of a job: process groups, orders to them, their heartbeats, and which rows each of them has.

Batches, backends and update rules import it; it imports nothing else of the trainer.
"""
