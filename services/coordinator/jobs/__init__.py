"""Job records: the store, its index, events, retention and removal, and the registry of the workers that run the jobs.

Every other folder of the coordinator uses this one, which imports none of them.
"""
