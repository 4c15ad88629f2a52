"""Results of checks: sound, healthy, and which checkpoint to restore."""
