"""Routes about jobs: submit, amend, operate, watch, read samples and checkpoints."""
