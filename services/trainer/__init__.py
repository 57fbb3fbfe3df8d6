"""The trainer service: makes policy updates from sealed batches, publishes weights and writes checkpoints."""
