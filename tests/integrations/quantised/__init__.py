"""Quantised models, with the libraries that read them."""
