"""The mathematics: pure functions of tensors. No I/O, no configuration, no state."""
