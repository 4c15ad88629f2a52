"""What a request needs: how large a scope, and which run it is about. Told from method and path, so that a new route is
never open by oversight: what changes something and is not listed here is an admin's.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

from holdfast_formats.errors import NoSuchRun
from holdfast_formats.rest.operations import Scope
from holdfast_service.api.access import bodies
from holdfast_service.control.access.tokens import Principal

PROBES = frozenset({"/healthz", "/readyz"})
OPEN = PROBES | {"/login"}
ENTER = "/enter"  # for the holder of a one-time link
OPEN_FILES = "/static/"  # style and script of pages, /login's among them
METRICS = "/metrics"
API = "/v1/"
TOKENS = "/v1/tokens"
CATALOG = "/v1/catalog/"  # what it says is about all runs, and some of it about none
NOTIFICATIONS = "/v1/notifications"  # where the daemon sends the alerts of all runs
AUDIT = "/v1/audit"  # an admin of some runs sees the entries about these
JOBS = "/v1/jobs"
LINKS = "/v1/links"  # a way in for a browser, with the rights of who asks
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
CHUNK = re.compile(r"/v1/ranks/[^/]+/uploads/[^/]+/(?:data|table)")
_RUN = re.compile(r"/v1/runs/([^/]+)")
_WRITES = re.compile(
    r"/v1/(?:ranks/.+|jobs(?:/[^/]+)?|runs/[^/]+/(?:checkpoints/[^/]+/(?:pin|labels/[^/]+)|alerts/[^/]+/acknowledgement))"
)
_ADMINS_JOBS = frozenset({"rebuild", "import", "export", "merge"})  # they change the catalog, or files that no run has
_RUNS_JOBS = frozenset({"verify", "scrub"})  # what they do is about the run they name, and nothing else


def needed(method: str, path: str) -> Scope:
    """The least scope that may do this. Pages need no more than reading: what they do, they ask the API for."""
    if path == AUDIT or _is_admins(path):
        return "admin"
    if method in SAFE or path == LINKS or not path.startswith(API):
        return "read"
    changes_run = method == "PATCH" and _RUN.fullmatch(path)
    return "write" if changes_run or _WRITES.fullmatch(path) else "admin"


def _is_admins(path: str) -> bool:
    """Whether even reading is for admins of all runs."""
    return path in (TOKENS, NOTIFICATIONS) or path.startswith((f"{TOKENS}/", f"{NOTIFICATIONS}/", CATALOG))


def is_open(method: str, path: str) -> bool:
    """Whether nobody is asked who they are."""
    return path in OPEN or (path == ENTER and method == "GET") or (path.startswith(OPEN_FILES) and method in SAFE)


def check(principal: Principal, method: str, path: str, query: bytes) -> None:
    """Whether it may, as far as that can be told before the body.

    Raises `Forbidden`, or `NoSuchRun` where a run that is not to be seen is read: nothing tells whether there is one.
    """
    principal.require(needed(method, path))
    if _is_admins(path):
        principal.require_run(None)
    for run in runs_of(path, query):
        if method not in SAFE:
            principal.require_run(run)
        elif not principal.sees(run):
            raise NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")
    if method not in SAFE and needed(method, path) == "admin" and _RUN.match(path) is None:
        principal.require_run(None)


def runs_of(path: str, query: bytes) -> list[str]:
    """The runs that path and query name."""
    asked = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("run", [])
    at = _RUN.match(path)
    return [*asked, *([at[1]] if at else [])]


def as_asked(whole: Principal, method: str, path: str, query: bytes) -> Principal:
    """As somebody with several grants counts in this request, before its body is known."""
    return whole.for_request(needed(method, path), runs_of(path, query))


def as_body_says(whole: Principal, method: str, path: str, body: Any) -> Principal:
    """The same, where only the body names the run: of a job that names none, all runs."""
    if not isinstance(body, dict) or (path != JOBS and not isinstance(body.get("run"), str)):
        return whole
    run, kind = body.get("run"), body.get("kind")
    known = path != JOBS or (isinstance(kind, str) and kind in _RUNS_JOBS)
    about = run if isinstance(run, str) and known else None
    return whole.for_request(needed(method, path), [about])


def body_of(method: str, path: str) -> bodies.Kind:
    """What kind of body is read there, where one is."""
    if method == "PUT" and CHUNK.fullmatch(path):
        return bodies.OCTETS
    return bodies.JSON if path.startswith(API) else bodies.FORM


def check_body(principal: Principal, path: str, body: Any) -> None:
    """What only the body tells: the run of a rank that says hello, and run and kind of a job. Raises `Forbidden`."""
    if not isinstance(body, dict):
        return
    run, kind = body.get("run"), body.get("kind")
    if path == JOBS:
        check_job(principal, kind if isinstance(kind, str) else None, run if isinstance(run, str) else None)
    elif isinstance(run, str):
        principal.require_run(run)


def check_job(principal: Principal, kind: str | None, run: str | None) -> None:
    """Whether it may have this done, or undone: `Forbidden`."""
    if kind in _ADMINS_JOBS:
        principal.require("admin")
    principal.require_run(run if kind in _RUNS_JOBS else None)
