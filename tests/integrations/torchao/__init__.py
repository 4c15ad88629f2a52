"""torchao, where it is installed."""
