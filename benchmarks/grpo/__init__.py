"""One GRPO task for several systems: the same checkpoint, prompts, reward, batch and optimizer for each of them."""
