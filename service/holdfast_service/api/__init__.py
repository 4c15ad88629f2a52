"""The HTTP edge: routes, problems, files with ranges. It decides nothing and keeps nothing; `docs/api.md` states it."""
