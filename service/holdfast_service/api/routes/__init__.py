"""One file for each kind of resource."""
