"""What puts the rooms together."""
