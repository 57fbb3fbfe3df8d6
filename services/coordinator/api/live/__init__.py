"""Routes of live agents: completions, episodes, served versions, feedback and its quarantine."""
