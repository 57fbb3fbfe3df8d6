"""The engine that decodes inside the rollout worker, on PyTorch alone."""
