"""Commands about live agents: chat, feedback, users' data, quarantine and dead letters."""
