"""What people and other programs are told, with real receivers on this machine."""
