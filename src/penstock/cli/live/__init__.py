"""Commands about live agents: chat, feedback, their users, and what could not be used."""
