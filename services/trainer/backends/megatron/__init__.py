"""Backend `megatron`: megatron-core GPT models, tensor, sequence, context, pipeline and expert parallel."""
