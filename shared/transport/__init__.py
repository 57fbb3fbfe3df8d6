"""How bytes move: the message bus (NATS), embedded servers, and the bulk plane for large tensors."""
