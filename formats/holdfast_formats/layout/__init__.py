"""Which rank holds what: layouts, meshes, and the rules of models."""
