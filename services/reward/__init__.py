"""The reward service: scores completions in processes that can be killed."""
