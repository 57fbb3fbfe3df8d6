"""Wire contracts: every message, name and byte layout. No sockets, no torch."""
