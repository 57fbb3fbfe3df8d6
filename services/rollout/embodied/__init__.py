"""Embodied jobs on a rollout worker.

A ticket requests a group of episodes from one reset id. Env workers run the simulators in sessions. Each session has
its own loop, so that one session steps while the policy decides for another session. Each environment has a lane, which
takes the next episode as soon as its current one ends.
"""
