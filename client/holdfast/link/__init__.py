"""The daemon: find it, connect, converse."""
