"""Conversations of one episode: turns are rendered, generated and timed until the episode ends."""
