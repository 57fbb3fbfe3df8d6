"""Learners: a job's policy on one rank, with its backend, update rule, reference and warm start.

`replica.py` opens the learner for a job's kind. Learners import backends, update rules, `batch/` and `ranks/`.
"""
