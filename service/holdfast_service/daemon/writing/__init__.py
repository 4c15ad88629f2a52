"""From slots to durable files."""
