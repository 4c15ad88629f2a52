"""Saved in one layout, loaded in another: small models, and what each rank holds by the plainest means there are."""
