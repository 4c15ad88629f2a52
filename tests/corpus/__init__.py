"""`make corpus`: checkpoints of real libraries are imported, compared bit by bit, exported, and loaded again."""
