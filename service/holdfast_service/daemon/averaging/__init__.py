"""Moving averages of what ranks train: kept by the daemon, and saved with their checkpoints."""
