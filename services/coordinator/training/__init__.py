"""The pure core of a training job (ledger, gate, decisions, promotion), the journal that writes its ledger, and its
checkpoints.

`leader/` and `online/` use it. It imports nothing else of the coordinator, so that a ledger folds to the same state
everywhere. A decision reads facts from outside, such as the time and the user's requests, from `Inputs`; only
`run.py` writes fields of a run.
"""
