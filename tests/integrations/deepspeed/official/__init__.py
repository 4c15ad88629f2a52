"""DeepSpeed's own tests of checkpoints, unchanged, with Holdfast in the place of its checkpoints."""
