"""The env service: runs simulators, tools and environments for rollout workers."""
