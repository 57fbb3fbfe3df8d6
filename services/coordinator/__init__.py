"""The coordinator: jobs, the ledger, the gate, and the HTTP API."""
