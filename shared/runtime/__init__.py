"""Runtime of every service process: life cycle, leases, deadlines, health, metrics, logs."""
