"""What commands print and look at."""
