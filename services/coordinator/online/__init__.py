"""Learning from live interactions: matching, admission, credit, and the groups that come of them."""
