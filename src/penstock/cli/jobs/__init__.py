"""Commands that submit, show, steer, check and export jobs."""
