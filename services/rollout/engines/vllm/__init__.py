"""vLLM as an engine: inside the rollout worker, and as an HTTP server. ``plugin`` runs in vLLM's own processes."""
