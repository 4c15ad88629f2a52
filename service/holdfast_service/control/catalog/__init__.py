"""Records: the tables of the catalog, and records that still wait for it."""
