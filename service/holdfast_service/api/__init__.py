"""The HTTP edge: routes, problems, files with ranges. It makes no decisions and stores nothing; see `docs/api.md`."""
