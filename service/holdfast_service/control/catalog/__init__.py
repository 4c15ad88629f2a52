"""What is recorded: the tables of the catalog, and what it is still to be told."""
