"""What the audit log calls a request, by method and path: known at the door, so that no route is left out by oversight. What
changes something and is not listed is recorded as `other`.

Uploads of ranks are not changes of anything that is there: of a rank only is recorded that it came. What it saves is an
event, like what ranks save over the socket.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast_service.api.access import scopes

_TABLE = """
PUT    /v1/runs/{run}/policy                                policy-set
PATCH  /v1/runs/{run}                                       run-changed
DELETE /v1/runs/{run}                                       run-deleted
POST   /v1/runs/{run}/undelete                              run-undeleted
POST   /v1/runs/{run}/rename                                run-renamed
DELETE /v1/runs/{run}/trash                                 run-purged
PUT    /v1/runs/{run}/alerts/{target}/acknowledgement       alert-acknowledged
DELETE /v1/runs/{run}/alerts/{target}/acknowledgement       alert-taken-back
PUT    /v1/alerts/{code}/{target}/acknowledgement           alert-acknowledged
DELETE /v1/alerts/{code}/{target}/acknowledgement           alert-taken-back
POST   /v1/replicas/{target}/retry                          replica-retried
POST   /v1/notifications/{target}/test                      notification-tested
PUT    /v1/runs/{run}/checkpoints/{step}/pin                pin-set
DELETE /v1/runs/{run}/checkpoints/{step}/pin                pin-removed
PUT    /v1/runs/{run}/checkpoints/{step}/labels/{target}    label-set
DELETE /v1/runs/{run}/checkpoints/{step}/labels/{target}    label-removed
DELETE /v1/runs/{run}/checkpoints/{step}                    checkpoint-removed
POST   /v1/jobs                                             job-submitted
DELETE /v1/jobs/{target}                                    job-cancelled
POST   /v1/tokens                                           token-created
POST   /v1/tokens/{target}/rotate                           token-rotated
DELETE /v1/tokens/{target}                                  token-revoked
PUT    /v1/quotas/{target}                                  quota-set
DELETE /v1/quotas/{target}                                  quota-removed
DELETE /v1/nodes/{target}                                   node-forgotten
POST   /v1/nodes/secret                                     secret-rotated
PUT    /v1/ranks/{target}                                   rank-registered
POST   /v1/links                                            link-made
GET    /enter                                               signed-in
POST   /login                                               signed-in
DELETE /v1/links                                            signed-out
"""
READ, OTHER = "read", "other"
SAVING = re.compile(r"/v1/ranks/.+")  # but its registration, which is in the table
_SIGNING = frozenset({"/enter", "/login", "/logout"})


class NamedAct(NamedTuple):
    """What a request is about. `kind` None: it changes nothing that is recorded."""

    kind: str | None
    run: str | None = None
    step: int | None = None
    target: str | None = None


def _compiled() -> list[tuple[str, re.Pattern[str], str]]:
    lines = (line.split() for line in _TABLE.strip().splitlines())
    return [(method, re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path)), kind) for method, path, kind in lines]


_ACTS = _compiled()


def named(method: str, path: str) -> NamedAct:
    """What a request is called, and what its path says that it is about."""
    for known, pattern, kind in _ACTS:
        found = pattern.fullmatch(path) if known == method else None
        if found is not None:
            about = found.groupdict()
            return NamedAct(kind, about.get("run"), _step(about.get("step")), about.get("target"))
    if method in scopes.SAFE or SAVING.fullmatch(path):
        return NamedAct(None)
    return NamedAct(OTHER if path.startswith(scopes.API) else None)  # a page asks the API, which is recorded


def is_api(path: str) -> bool:
    """Whether this is asked of the API itself, or lets somebody in: what a page asks for is not recorded twice."""
    return path.startswith(scopes.API) or path in _SIGNING or path == scopes.METRICS


def _step(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None
