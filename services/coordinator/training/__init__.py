"""The pure core of a training job (ledger, gate, decisions, promotion), the journal that writes its ledger, and its
checkpoints.

`leader/` and `online/` use it. It imports nothing else of the coordinator, so that a ledger folds to the same state
everywhere.
"""
