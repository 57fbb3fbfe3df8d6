"""Job records: the store, its index, events, retention and removal, and the registry of the workers that run the jobs.

`api/`, `feedback/`, `finetuning/`, `leader/`, `queries/` and `serving/` use it, and so do modules beside them. It
imports nothing else of the coordinator.
"""
