"""The commands of `holdfast`, one a file. Each turns options into one call and prints the result."""
