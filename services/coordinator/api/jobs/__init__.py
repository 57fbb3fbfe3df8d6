"""Routes about jobs: submit, amend, control, observe, and read samples and checkpoints."""
