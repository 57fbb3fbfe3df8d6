"""One training step for several systems: the same weights, batch and optimizer settings for each of them."""
