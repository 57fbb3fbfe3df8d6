"""Backend `fsdp`: shards models over the ranks with PyTorch FSDP2. Their forward pass is the decoder in
``shared.models.decoder``, which Penstock's own engine runs too."""
