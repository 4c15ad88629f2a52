"""The HTTP edge: routes, problems, files with ranges. It decides nothing and keeps nothing; `API.md` states it."""
