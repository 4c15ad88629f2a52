"""What checks have found: sound, healthy, and which checkpoint that makes the one to restore."""
