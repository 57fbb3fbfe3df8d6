"""The coordinator service: job store, ledger, admission of groups to training, promotion of versions, HTTP API."""
