"""Routes: the pages, what a browser loads for them, and signing in."""
