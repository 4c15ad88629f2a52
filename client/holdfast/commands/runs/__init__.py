"""Commands about a run as a whole."""
