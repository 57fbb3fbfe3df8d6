"""``penstock demo``: start a deployment, run one job and show its outcome, in one command."""
