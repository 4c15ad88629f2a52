"""Who may ask: tokens, and the owner of the daemon."""
