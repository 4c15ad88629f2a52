"""Moving averages of the trained state: kept by the daemon, and saved with checkpoints."""
