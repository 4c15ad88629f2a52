"""For a rank that shares no memory with its daemon: slots of its own, and uploads."""
