"""Commands that install, run, check, secure and back up a deployment."""
