"""Backend `megatron`: megatron-core GPT models with tensor, sequence, context, pipeline and expert parallelism."""
