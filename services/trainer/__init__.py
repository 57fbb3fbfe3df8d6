"""The trainer: takes sealed batches, makes policy updates, publishes weights, keeps checkpoints."""
