"""``penstock demo``: a deployment, one job and its outcome in one command."""
