"""What any system saves, every other one loads: `make integrations ONLY=matrix`."""
