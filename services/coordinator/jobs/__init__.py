"""Jobs as records: the store, its index, retention and removal, and the workers that are there for them.

Every other folder of the coordinator calls it; it imports none of them.
"""
