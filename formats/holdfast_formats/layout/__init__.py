"""Who holds what: layouts, meshes, and the rules of models."""
