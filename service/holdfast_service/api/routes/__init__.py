"""REST routes, one file per kind of resource."""
