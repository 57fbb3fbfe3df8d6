"""Job files, one model for each kind of job, and what of a running job may be amended."""
