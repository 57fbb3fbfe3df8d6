"""Checkpoints: the state of a job on every rank, its files, and tensors that are whole or sharded over ranks.

`replica.py` writes and reads them; `checkpointing.py` says when. It imports backends, optimizer and `ranks/`.
"""
