"""Write slots to durable files."""
