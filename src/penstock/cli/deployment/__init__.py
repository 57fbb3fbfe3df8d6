"""Commands that install, run, check, secure and copy a deployment."""
