"""Marks dry runs for the audit log. The route does it, because a route without the parameter `dry_run` ignores it and
changes things.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request


def _dry_run(
    request: Request, dry_run: Annotated[bool, Query(description="change nothing; only report what would happen")] = False
) -> bool:
    request.state.dry_run = dry_run
    return dry_run


DryRun = Annotated[bool, Depends(_dry_run)]
