"""Read a file once for several ranks of this machine."""
