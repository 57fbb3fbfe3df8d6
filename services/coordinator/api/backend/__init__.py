"""The coordinator as the routes see it, as protocols: the API imports nothing else of it."""
