"""Checkpoints of the Hugging Face Trainer and of Accelerate, in the form from which Holdfast's adapters resume them."""
