"""Checkpoints: a job's state on every rank, its files, and tensors that are whole or sharded over ranks.

`replica.py` writes and reads checkpoints; `checkpointing.py` decides when. This package imports backends, optimizer and
`ranks/`.
"""
