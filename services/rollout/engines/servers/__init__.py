"""Engines that are HTTP servers: a client, and what their adapters have in common."""
