"""From a checkpoint into live state."""
