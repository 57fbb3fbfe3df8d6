"""Backend `megatron`: megatron-core GPT models, tensor, sequence and context parallel."""
