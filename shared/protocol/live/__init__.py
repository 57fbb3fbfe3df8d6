"""Messages of live agents: requests, their records, episodes, and the keys and tokens of their clients."""
