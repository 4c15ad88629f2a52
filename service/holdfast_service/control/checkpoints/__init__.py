"""What is on the disk: planned, published, read, removed, compared with the catalog."""
