"""What a fault does to each peer: a trainer that is killed, files that are damaged, a disk that is full."""
