"""One read of a file for several ranks of this machine."""
