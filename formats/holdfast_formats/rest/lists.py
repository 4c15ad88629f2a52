"""The lists that commands, pages and CSV files show, and their columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from holdfast_formats import metric_values
from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import AUDITED, AuditEntry
from holdfast_formats.rest.columns import CellPart, Column, Listing, bad, checkpoint, count, quiet
from holdfast_formats.rest.replica_lags import ReplicaLag, told_refusals
from holdfast_formats.timestamps import utc_now

if TYPE_CHECKING:
    from holdfast_formats.rest.access import Quota
    from holdfast_formats.rest.groups import GroupDetails, GroupMember, MeasuredRun, RunGroup
    from holdfast_formats.rest.measurements import Difference, TensorStatistics
    from holdfast_formats.rest.notifications import NotificationTarget
    from holdfast_formats.rest.operations import Event, Job, Token
    from holdfast_formats.rest.retention import Verdict
    from holdfast_formats.rest.runs import RunStorage, TrashedRun

KEYS_SHOWN = 6  # of a config
NEARLY_FULL = 0.9  # of a quota
LATE_S = 20.0  # a node renews its membership every 10 s
DUTIES = {
    "upkeep": "sweeps the root, ends saves of lost nodes and applies retention",
    "notifications": "sends alerts",
}


def _expiry(token: Token) -> tuple[CellPart, ...]:
    if token.revoked is not None:
        return bad("revoked"), CellPart(token.revoked, "age")
    expired = token.expires is not None and token.expires <= utc_now()
    return (*([bad("expired")] if expired else []), CellPart(token.expires, "age") if token.expires else quiet("never"))


def _limits(token: Token) -> list[CellPart]:
    limits = [CellPart(f"{token.requests_per_s} requests/s")] if token.requests_per_s else []
    limits += [CellPart(token.bytes_per_s, "bytes"), CellPart("a second")] if token.bytes_per_s else []
    return limits or [quiet("none")]


TOKENS: Listing[Token] = Listing(
    (
        Column("Name", "name"),
        Column("Scope", "scope"),
        Column("Runs", "runs", "code"),
        Column("Created", "created", "age", omit=1),
        Column(
            "Used", lambda one: (one.used or quiet("never"), one.used_from and quiet(f"from {one.used_from}")), "age", omit=2
        ),
        Column("Expires", _expiry),
        Column("Limits", _limits, omit=3),
    ),
    "/v1/tokens",
    ("name", "scope", "runs", "created", "used", "expires", "revoked"),
)


def _fullness(quota: Quota) -> tuple[CellPart | None, ...]:
    share = quota.used_bytes / quota.quota_bytes
    level = bad("full: saves are refused") if share >= 1 else CellPart("nearly full", "warning")
    return CellPart((quota.used_bytes, quota.quota_bytes), "meter"), level if share >= NEARLY_FULL else None


def _pattern(quota: Quota) -> CellPart:
    return CellPart(quota.pattern, "code", None if quota.pattern == "*" else f"/?q={quote(quota.pattern.replace('*', ''))}")


QUOTAS: Listing[Quota] = Listing(
    (
        Column("Runs", _pattern),
        Column("Used", "used_bytes", "bytes"),
        Column("Quota", "quota_bytes", "bytes"),
        Column("Full", _fullness, "meter"),
        Column("Count", "runs", "number"),
    ),
    "/v1/quotas",
    ("pattern", "used_bytes", "quota_bytes", "runs"),
    marked=lambda quota: quota.used_bytes >= quota.quota_bytes,
)


def _about(entry: AuditEntry) -> tuple[CellPart | str | None, ...]:
    asked = CellPart(f"{entry.method} {entry.path}", "code") if entry.kind in ("read", "other") else None
    target = CellPart(entry.target, "code") if entry.target else None
    return checkpoint(entry.run, entry.step) if entry.run else None, target, asked


def _result(entry: AuditEntry) -> tuple[CellPart | str | None, ...]:
    refused = bad(entry.code or str(entry.status)) if entry.status else quiet("cut off")
    more = {"Request": f"{entry.method} {entry.path} {entry.status}", "Node": entry.node, "ID": entry.request}
    return (
        "done" if entry.status and entry.status < 400 else refused,
        quiet(f"and {entry.untold} more") if entry.untold else None,
        CellPart(more, "more", None, "more"),
    )


AUDIT: Listing[AuditEntry] = Listing(
    (
        Column("When", "at", "moment"),
        Column("Who", lambda entry: CellPart(entry.who, "text", f"/audit?who={quote(entry.who)}") if entry.who else None),
        Column("From", lambda entry: (entry.address or "this machine", quiet(entry.via)), omit=1),
        Column("What", lambda entry: CellPart(entry.kind, "text", None, AUDITED.get(entry.kind, ""))),
        Column("About", _about),
        Column("Result", _result, wraps=True),
    ),
    "/v1/audit",
    tuple(AuditEntry.model_fields),
)


def _name(node: bodies.Node) -> tuple[CellPart | str | None, ...]:
    return node.name, quiet(node.host) if node.host and node.host.split(".")[0] != node.name else None


def _state(node: bodies.Node) -> tuple[CellPart | None, ...]:
    gone = not node.live and node.heard_s is not None
    return CellPart(node.state, "state"), CellPart(round(node.heard_s or 0), "duration") if gone else None


def _ranks(node: bodies.Node) -> list[CellPart]:
    runs = sorted(node.runs.items())
    links = [checkpoint(run, None, f"{ranks} of {run}{',' if run != runs[-1][0] else ''}") for run, ranks in runs]
    return links or [quiet(str(node.ranks or "none"))]


def _memory(node: bodies.Node) -> list[CellPart]:
    held = [(checkpoint(one.run, None, f"{one.run}@{one.step}:"), CellPart(one.bytes, "bytes")) for one in node.memory]
    return [CellPart(node.arena_bytes, "bytes"), *(part for pair in held for part in pair)] if node.live else []


def behind(node: bodies.Node) -> CellPart:
    """How far a live node is behind: its heartbeat, its saves, and its queued catalog writes."""
    late = node.heard_s if node.heard_s is not None and node.heard_s > LATE_S else None
    lag = [] if late is None else [f"not heard from for {late:.0f} s"]
    lag += [f"{count(node.sealed, 'save')} sealed, not committed yet"] if node.sealed else []
    waiting = f"{count(node.catalog_waiting, 'record waits', 'records wait')} for the catalog"
    lag += [node.catalog] if node.catalog else [waiting] if node.catalog_waiting else []
    return CellPart(None) if not node.live else CellPart("; ".join(lag)) if lag else quiet("nothing")


def _address(node: bodies.Node) -> CellPart:
    more = {"Process": node.pid, "Root": node.root, "Socket": node.socket or "none", "For other nodes": node.exchange}
    more |= {"Version": node.version, "Member since": node.since}
    return CellPart({name: str(fact) for name, fact in more.items() if fact}, "more", None, node.url or "no HTTP")


NODES: Listing[bodies.Node] = Listing(
    (
        Column("Node", _name),
        Column("State", _state),
        Column("Ranks", _ranks, wraps=True),
        Column("Memory", _memory, wraps=True, omit=3),
        Column("Duties", lambda node: [CellPart(one, "text", None, DUTIES.get(one, "")) for one in node.duties], omit=4),
        Column("Behind", behind, wraps=True),
        Column("Up since", lambda node: node.started if node.live else None, "age", omit=2),
        Column("Address", "url", omit=1, only="command"),
        Column("Address", _address, only="page"),
    ),
    "/v1/nodes",
    ("name", "host", "state", "ranks", "runs", "arena_bytes", "duties", "sealed", "started", "version", "url"),
    marked=lambda node: node.state == "lost",
)


def _copying(lag: ReplicaLag) -> CellPart | None:
    return None if lag.copying is None else checkpoint(lag.copying.run, lag.copying.step)


def _copied(lag: ReplicaLag) -> tuple[int, int, str] | None:
    return None if lag.copying is None else (lag.copying.done_bytes, lag.copying.total_bytes, "running")


def _trouble(lag: ReplicaLag) -> CellPart | None:
    refused = told_refusals(lag.bucket)
    return bad(f"{lag.problem} (since {lag.problem_since})") if lag.problem else bad(refused) if refused else None


REPLICAS: Listing[ReplicaLag] = Listing(
    (
        Column("Replica or tier", "replica"),
        Column("Node", "node", omit=2),
        Column("Missing", "missing", "number"),
        Column("Bytes", "missing_bytes", "bytes"),
        Column("Oldest waits", lambda lag: lag.lag_s or None, "duration"),
        Column("Copies now", _copying),
        Column("Progress", _copied, "progress"),
        Column("A second", lambda lag: lag.copying and lag.copying.bytes_per_second, "bytes", omit=1),
        Column("Problem", _trouble, wraps=True),
    ),
    "/v1/nodes",
    marked=lambda lag: lag.problem is not None,
)

SAVES: Listing[bodies.Round] = Listing(
    (
        Column("Run", lambda save: checkpoint(save.run)),
        Column("Step", "step", "step"),
        Column("State", "state", "state"),
        Column("Ranks sealed", lambda save: f"{save.sealed} of {save.world}"),
        Column("Started", "opened", "age"),
        Column("Node", "node"),
        Column("Why", "detail", wraps=True),
    ),
    "/v1/rounds",
    ("run", "step", "attempt", "state", "sealed", "world", "opened", "ended", "node", "code", "detail"),
    ("run", "state", "step_min", "step_max", "since"),
)

JOBS: Listing[Job] = Listing(
    (
        Column("Job", lambda job: CellPart(job.id, "step", f"/jobs/{job.id}"), "step"),
        Column("Kind", "kind"),
        Column("Of", lambda job: checkpoint(job.run, job.step) if job.run else quiet("everything")),
        Column("State", "state", "state"),
        Column("Why", lambda job: (job.problem or {}).get("detail"), "error", only="page"),
        Column("Bytes", lambda job: (job.done_bytes, job.total_bytes, job.state), "progress", omit=2),
        Column("Created", "created", "age"),
        Column("Node", "node", omit=1),
    ),
    "/v1/jobs",
    ("id", "kind", "run", "step", "state", "created", "started", "ended", "done_bytes", "total_bytes", "node", "problem"),
    ("state", "kind", "run"),
)

STORAGE: Listing[RunStorage] = Listing(
    (
        Column("Run", lambda one: checkpoint(one.run)),
        Column("Bytes", "bytes", "bytes"),
        Column("Checkpoints", "checkpoints", "number", omit=1),
        Column("Last day", "day_bytes", "bytes", omit=4),
        Column("1–7 days", "week_bytes", "bytes", omit=3),
        Column("7–30 days", "month_bytes", "bytes", omit=2),
        Column("Older", "older_bytes", "bytes"),
    ),
    "/v1/storage",
    ("run", "checkpoints", "bytes", "day_bytes", "week_bytes", "month_bytes", "older_bytes"),
    ("prefix", "q"),
)
TRASH: Listing[TrashedRun] = Listing(
    (
        Column("Run", "run"),
        Column("Deleted", "deleted", "age"),
        Column("Until", lambda one: one.expires or CellPart("for ever"), "moment"),
        Column("Checkpoints", "checkpoints", "number"),
        Column("Newest", "newest", "step"),
        Column("Bytes", "bytes", "bytes"),
        Column("Entry", "entry", only="command"),
    )
)


def _gets(target: NotificationTarget) -> list[CellPart | str]:
    words: list[CellPart | str] = [f"errors{'' if target.level == 'error' else ' and warnings'} of"]
    words += ["all runs," if target.runs == "*" else CellPart(f"{target.runs},", "code")]
    words += ["again every", CellPart(target.repeat_s, "duration")] if target.repeat_s else ["once"]
    return words + ([] if target.recovery else ["and not when it is over"])


def _delivery(target: NotificationTarget) -> tuple[CellPart | str | None, ...]:
    if target.problem is None:
        return ("fine",)
    return bad("not sent:"), target.problem, CellPart(target.problem_since, "age") if target.problem_since else None


TARGETS: Listing[NotificationTarget] = Listing(
    (
        Column("Name", "name"),
        Column("Kind", "kind"),
        Column("To", "to", "code"),
        Column("Gets", _gets, wraps=True),
        Column("Firing", "firing", "number"),
        Column(
            "Last sent",
            lambda one: (one.last_sent or quiet("never"), one.last_node and quiet(f"from {one.last_node}")),
            "age",
        ),
        Column("State", _delivery, wraps=True),
        Column("Sent", "sent", "number", omit=1),
        Column("Failed", "failed", "number", omit=2),
        Column("Dropped", "dropped", "number", omit=3),
    ),
    "/v1/notifications",
    marked=lambda target: target.problem is not None,
)


def verdicts(run: str, new: Collection[int] = ()) -> Listing[Verdict]:
    """`new`: steps whose verdict a proposed policy changes."""

    def act(verdict: Verdict) -> tuple[CellPart | None, ...]:
        word = "remove" if not verdict.keep else "thin" if verdict.thin else "compact" if verdict.compact else "keep"
        return CellPart(word, "state"), CellPart("new", "state") if verdict.step in new else None

    def size(verdict: Verdict) -> list[CellPart | int]:
        """Its bytes, and those after thinning or compacting."""
        about = CellPart("→ about" if verdict.compact else "→")
        return [verdict.bytes] if verdict.bytes_after is None else [verdict.bytes, about, verdict.bytes_after]

    return Listing(
        (
            Column("Step", lambda one: checkpoint(run, one.step, str(one.step)), "step"),
            Column("Verdict", act),
            Column("Age", "created", "age"),
            Column("Bytes", size, "bytes"),
            Column("Why", lambda one: "; ".join(filter(None, [*one.reasons, one.thin_reason])), wraps=True),
        )
    )


def _unsound(name: str) -> Column[TensorStatistics]:
    return Column(name, lambda one: CellPart(getattr(one, name), "error" if one.nan + one.inf else "text"), "number")


STATISTICS: Listing[TensorStatistics] = Listing(
    (
        Column("Group", "group", omit=3),
        Column("Tensor", "name"),
        Column("Dtype", "dtype", omit=2),
        _unsound("nan"),
        _unsound("inf"),
        Column("Minimum", "minimum", "number", omit=4),
        Column("Maximum", "maximum", "number", omit=5),
        Column("Mean", "mean", "number", omit=1),
        Column("RMS", "rms", "number"),
        Column("Zeros", "zeros", "share", omit=6),
        Column("Change", "change", "number"),
    ),
    "statistics",
    ("group", "name", "dtype", "elements", "nan", "inf", "minimum", "maximum", "mean", "rms", "zeros", "change"),
    ("group", "q", "sort"),
)


def _differing(group: RunGroup) -> list[str]:
    more = len(group.differs) - KEYS_SHOWN
    return [", ".join(group.differs[:KEYS_SHOWN]), *([f"and {more} more"] if more > 0 else [])]


def _measured(one: MeasuredRun | None, text: str | None = None) -> list[CellPart | float]:
    """The value, and its checkpoint."""
    return [] if one is None else [one.value, checkpoint(one.run, one.step, text)]


RUN_GROUPS: Listing[RunGroup] = Listing(
    (
        Column("Tag", lambda one: CellPart(one.tag, "text", f"/?tag={quote(one.tag)}")),
        Column("Runs", lambda one: [one.runs, quiet(", ".join(f"{number} {life}" for life, number in one.states.items()))]),
        Column("Metric", "metric"),
        Column("Best", lambda one: _measured(one.best), "number", omit=1),
        Column("Last", lambda one: _measured(one.last), "number", omit=2),
        Column("Differs in", _differing, "code", wraps=True),
    ),
    "/v1/groups",
    ("tag", "runs", "states", "metric", "best", "last", "differs"),
    ("metric", "mode"),
)


def members(group: GroupDetails) -> Listing[GroupMember]:
    """The runs of a group, with the first config keys that differ."""

    def value(name: str) -> Column[GroupMember]:
        return Column(name, lambda one: one.config.get(name), "code", omit=4)

    return Listing(
        (
            Column("Run", lambda one: checkpoint(one.run)),
            Column("State", "standing", omit=2),
            *map(value, group.differs[:KEYS_SHOWN]),
            Column(
                f"Best {group.metric or 'metric'}",
                lambda one: _measured(one.best, f"@{one.best.step}" if one.best else None),
                "number",
            ),
            Column("Last", "last", "number"),
            Column("Newest", "newest", "step", omit=1),
        )
    )


def _difference(one: Difference) -> CellPart:
    if one.state in ("reshaped", "retyped"):
        before, now = (one.detail["shape_a"], one.shape) if one.state == "reshaped" else (one.detail["dtype_a"], one.dtype)
        return CellPart(f"{one.state}: {before} → {now}", "warning")
    sides = (("A", one.detail.get("nonfinite_a")), ("B", one.detail.get("nonfinite_b")))
    sick = " and ".join(f"{number} in {side}" for side, number in sides if number)
    state = one.state.replace("-", " ")
    return bad(f"{state}, not finite: {sick}") if sick else CellPart(state)


DIFFERENCES: Listing[Difference] = Listing(
    (
        Column("Group", "group", omit=3),
        Column("Tensor", "name"),
        Column("What", _difference, wraps=True),
        Column("Relative", "relative", "number"),
        Column("Change", "change", "number", omit=5),
        Column("Norm A", "norm_a", "number", omit=1),
        Column("Norm B", "norm_b", "number", omit=2),
        Column("Differing", lambda one: one.detail.get("differing"), "number", omit=4),
    ),
    "compare",
    ("group", "name", "state", "dtype", "shape", "bytes", "norm_a", "norm_b", "change", "relative"),
    ("a", "b", "run_b", "group", "state", "q"),
)


def runs(asked: bool, extra: Column[bodies.Run] | None = None, tagged: bool = False) -> Listing[bodies.Run]:
    """`asked`: a service answered, which knows what the runs do. `extra`: what they are sorted by. `tagged`: some have
    tags.
    """
    return Listing(
        (
            Column("Run", "name"),
            Column("Newest", "newest", "step"),
            Column("Checkpoints", "checkpoints", "step", omit=1),
            Column("Bytes", "bytes", "bytes"),
            Column("State", lambda run: (run.standing or run.life) if asked else None),
            *([extra] if extra else []),
            *([Column("Tags", lambda run: " ".join(run.tags), wraps=True, omit=2)] if tagged else []),
        )
    )


def _with_state(row: dict[str, Any]) -> Mapping[str, Any]:
    return {**row, "state": bodies.CheckpointInfo.model_validate(row).state}


def _marks(info: bodies.CheckpointInfo) -> list[str]:
    compact = f"compact ({info.compacted.optim})" if info.compacted is not None else ""
    return ["weights only" if info.thinned is not None else "", compact, "pinned" if info.pinned else "", *info.labels]


def _metrics(made: bodies.CheckpointInfo) -> list[str]:
    return [f"{name}={metric_values.text(value)}" for name, value in made.metrics.items()]


def _health(info: bodies.CheckpointInfo) -> CellPart | None:
    """What the check after the commit has found of values; None before it, and without a service."""
    if info.healthy is None:
        return None
    return bad(f"{count(info.nonfinite, 'value')} not finite") if info.nonfinite else CellPart("healthy")


def _size(made: bodies.CheckpointInfo) -> list[CellPart | int]:
    """Its bytes, and how many of them no older checkpoint has."""
    return [made.bytes, made.bytes - made.shared_bytes, CellPart("new")] if made.shared_bytes else [made.bytes]


def checkpoints(asked: bool) -> Listing[bodies.CheckpointInfo]:
    """`asked`: a service answered, so states and labels are known. A directory alone shows only the commits."""
    unchecked = " (not checked yet)" if asked else ""
    return Listing(
        (
            Column("Step", "step", "step"),
            Column("Created", "created", "age"),
            Column("State", lambda one: f"{one.state}{unchecked if one.unchecked else ''}"),
            *([Column("Health", _health, omit=2)] if asked else []),
            Column("Bytes", _size, "bytes", omit=5),
            Column("Tensors", "tensors", "step", omit=1),
            Column("Groups", "groups", omit=3),
            Column("Metrics", _metrics, wraps=True, omit=4),
            Column("Marks", _marks, wraps=True),
        ),
        "checkpoints",
        ("step", "state", "created", "bytes", "tensors", "groups", "metrics", "pinned", "labels", "attempt", "world"),
        ("label", "state", "step_min", "step_max", "since", "sort"),
        _with_state,
    )


EVENTS: Listing[Event] = Listing(
    (), "/v1/events", ("id", "at", "level", "kind", "run", "step", "node", "text"), ("run", "kind")
)

# What an import and an export report: a group is its name and facts; files of the source; what was left out.
GROUPS: Listing[tuple[str, Mapping[str, Any]]] = Listing(
    (
        Column("Group", lambda group: group[0]),
        Column("Tensors", lambda group: group[1]["tensors"], "number"),
        Column("Bytes", lambda group: group[1]["bytes"], "bytes"),
        Column("Dtypes", lambda group: group[1]["dtypes"], "code", wraps=True),
        Column(
            "For example",
            lambda group: ", ".join([*group[1]["names"], *(f"value {one}" for one in group[1].get("values", ()))]),
            "code",
            wraps=True,
        ),
    )
)
SOURCE_FILES: Listing[Mapping[str, Any]] = Listing(
    (
        Column("File of the source", "file", "code"),
        Column("Bytes", "bytes", "bytes"),
        Column("Becomes", "use", wraps=True),
        Column("Why", lambda file: file.get("reason"), wraps=True),
    )
)
LEFT_OUT: Listing[Mapping[str, Any]] = Listing((Column("Not in it", "what", "code"), Column("Why", "reason", wraps=True)))
