"""Test suites of the frameworks themselves, unchanged, without Holdfast and with it: `make official`."""
