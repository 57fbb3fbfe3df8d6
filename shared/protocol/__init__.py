"""Wire contracts: every message, name and byte layout. Imports neither sockets nor torch."""
