"""Message bus (NATS), embedded servers, and the bulk plane for large tensors."""
