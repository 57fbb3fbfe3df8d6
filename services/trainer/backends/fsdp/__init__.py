"""Backend `fsdp`: PyTorch FSDP2 over the decoder that sampler and trainer share."""
