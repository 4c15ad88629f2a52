"""Access control: tokens, and the owner of the daemon."""
