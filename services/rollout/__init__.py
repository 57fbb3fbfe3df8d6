"""The rollout service: its workers own inference engines, which serve the newest committed policy version.

A ticket is the coordinator's request for completions of one prompt, or for episodes of one task. A worker answers it
with a group of these completions or episodes.
"""
