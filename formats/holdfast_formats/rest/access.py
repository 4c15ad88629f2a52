"""Bodies of the REST API about access: the audit log, and the caller."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from holdfast_formats.body import Body
from holdfast_formats.rest.operations import Scope

ALL, AND = "*", ","  # in a pattern of runs
By = Literal["token", "owner", "login", "anybody", "local", "nobody"]
Via = Literal["http", "client", "dashboard", "offline"]

# Every kind of entry of the audit log, and its meaning. Behind each is a change, done or attempted; `read` and `other` are
# of refused requests alone, the second also of changes that this version has no name for.
AUDITED: dict[str, str] = {
    "policy-set": "the retention policy of a run was set",
    "run-changed": "owner, notes, tags, archiving or an acknowledgement of a run changed",
    "run-deleted": "a run was moved to the trash",
    "run-undeleted": "a run was brought back from the trash",
    "run-renamed": "a run was renamed; `run` is the old name",
    "run-purged": "a deleted run was removed for good",
    "alert-acknowledged": "an alert was acknowledged or snoozed; `target` is its code, or the node or replica",
    "alert-taken-back": "the acknowledgement of an alert was withdrawn",
    "replica-retried": "failed copies to a replica were retried; `target` is its name",
    "notification-tested": "a test message was sent; `target` is the target's name",
    "pin-set": "a checkpoint was pinned",
    "pin-removed": "a checkpoint was unpinned",
    "label-set": "a checkpoint got a label",
    "label-removed": "a label was removed from a checkpoint",
    "checkpoint-removed": "a checkpoint was removed",
    "job-submitted": "a job was submitted; `target` is its kind",
    "job-cancelled": "a job was cancelled; `target` is its ID",
    "token-created": "a token was created; `target` is its name",
    "token-rotated": "a token got a new secret; `target` is its name",
    "token-revoked": "a token was revoked; `target` is its name",
    "quota-set": "the quota of a pattern of runs was set; `target` is the pattern",
    "quota-removed": "the quota of a pattern of runs was removed; `target` is the pattern",
    "view-set": "a view of the overview was saved; `target` is its name",
    "view-removed": "a saved view was removed; `target` is its name",
    "node-forgotten": "a node that is gone was removed from the list; `target` is its name",
    "secret-rotated": "the nodes of the catalog got a new shared secret",
    "rank-registered": "a rank that shares no memory with the daemon registered itself, to save or restore",
    "link-made": "a one-time sign-in link for a browser was created",
    "signed-in": "a browser signed in, with a token or by a one-time link",
    "signed-out": "a browser signed out",
    "catalog-rebuilt": "the catalog was rebuilt from the directories, with no daemon",
    "catalog-adopted": "the catalog was assigned to a root, with no daemon",
    "checkpoint-repaired": "a checkpoint was repaired, with no daemon",
    "checkpoint-imported": "a checkpoint was imported, by a command of the daemon's user",
    "checkpoint-merged": "a checkpoint was merged from others, by a command of the daemon's user",
    "checkpoint-exported": "a checkpoint was exported, by a command of the daemon's user",
    "read": "a request was refused",
    "other": "any other request; see `method` and `path`",
}


class AuditEntry(Body):
    """One request in the audit log: its author, origin and result. Never a secret, and never a body."""

    id: int
    at: str = Field(description="RFC 3339, UTC")
    who: str = Field(description="name of the token, of the person, or of the user of the machine; empty if unknown")
    by: By = Field(description="how `who` was authenticated")
    address: str = Field(description="the peer's address; for acts of a page, that of the browser or its proxy")
    via: Via = Field(description="`client`: the `holdfast` command or Api; `http`: any other program")
    kind: str = Field(description="one of the kinds that docs/api.md lists")
    run: str | None = None
    step: int | None = None
    target: str | None = Field(default=None, description="what else it concerned, such as the name of a token")
    method: str
    path: str = Field(description="without the query")
    status: int = Field(description="of the answer; 0 if the connection ended before")
    code: str | None = Field(default=None, description="of the problem, if it was one")
    request: str = Field(description="`X-Request-Id` of the response; requests of a page share the page's")
    node: str
    untold: int = Field(default=0, description="similar attempts since the last entry that were only counted")


def matches(pattern: str, run: str) -> bool:
    """Whether a run is one of the pattern's: a name, a prefix ending in `*`, `*` for all, or several of these."""
    return any(run.startswith(one[:-1]) if one.endswith(ALL) else run == one for one in pattern.split(AND))


class Grant(Body):
    """A scope for some runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: Scope
    runs: str = Field(default="*", description="a run's name, a prefix ending in *, or * for all")


class Whoami(Body):
    """The caller's identity and scopes."""

    name: str
    by: By
    scope: Scope
    runs: str = Field(description="a run's name, a prefix ending in *, or * for all; several are separated by commas")
    grants: list[Grant] = Field(default_factory=list, description="for a person: what each of their groups grants")
    expires: str | None = Field(default=None, description="when the token expires")
    address: str = Field(description="where the request came from, as the service sees it")

    def may_save(self, run: str) -> bool:
        """Whether the caller may save this run."""
        grants = self.grants or [Grant(scope=self.scope, runs=self.runs)]
        return any(one.scope != "read" and matches(one.runs, run) for one in grants)


class QuotaRequest(Body):
    model_config = ConfigDict(extra="forbid", strict=True)  # `true` is no number of bytes

    quota_bytes: int = Field(ge=1, le=2**62, description="bytes that all runs of the pattern may hold together")


class Quota(Body):
    """How much the runs of a team may hold together, and how much they do."""

    pattern: str
    quota_bytes: int
    used_bytes: int
    runs: int = Field(description="number of runs of the pattern with a checkpoint")
