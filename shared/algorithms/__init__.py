"""Pure functions of tensors: advantages, losses, statistics. No I/O, no configuration, no state."""
