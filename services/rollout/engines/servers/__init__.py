"""Engines that are HTTP servers: their client, and the common parts of their adapters."""
