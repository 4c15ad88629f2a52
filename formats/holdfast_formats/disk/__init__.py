"""The bytes of a checkpoint directory."""
