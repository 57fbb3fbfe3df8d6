"""Commands that submit, show, control, check and export jobs."""
