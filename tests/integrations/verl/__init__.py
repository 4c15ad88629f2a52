"""verl with Holdfast's checkpoint manager."""
