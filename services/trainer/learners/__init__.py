"""A job's policy on one rank: the backend that holds it, the update rule that trains it, its reference and warm start.

`replica.py` opens the learner of a job's kind. It imports backends, update rules, `batch/` and `ranks/`.
"""
