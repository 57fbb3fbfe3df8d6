"""What every service process needs: life cycle, leases, deadlines, health, metrics, logs."""
