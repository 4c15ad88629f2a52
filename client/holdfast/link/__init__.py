"""Find the daemon, connect to it, and exchange messages."""
