"""The HTTP edge: routes, problems, files with ranges. It takes no decisions and stores nothing; see `docs/api.md`."""
