"""Every route, and what it needs: written down a second time, by hand, and not taken from what is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast_formats.digest import digest
from holdfast_formats.staging import wire

OWN, FOREIGN = "team-a-1", "team-b-1"
RANKS = {OWN: "a" * 32, FOREIGN: "b" * 32}  # of each run a rank has said hello by this id
STEP, GONE = 5, 999  # a step that is there, and one that is not: what would remove something is tried on that
SCOPES = ("read", "write", "admin")

# method, path, least scope (open: nobody is asked), what it is about (path: the run of the path; seen: what the asker may
# see; body, rank: the run that these name; all: everything; none), and the body it reads
_TABLE = """
GET    /v1/runs                                                  read  seen
GET    /v1/runs/{run}                                            read  path
DELETE /v1/runs/{run}                                            admin path
POST   /v1/runs/{run}/undelete                                   admin path
POST   /v1/runs/{run}/rename                                     admin path
DELETE /v1/runs/{run}/trash                                      admin path
GET    /v1/trash                                                 read  seen
PATCH  /v1/runs/{run}                                            write path json
GET    /v1/runs/{run}/about                                      read  path
GET    /v1/runs/{run}/checkpoints                                read  path
GET    /v1/runs/{run}/checkpoints/{step}                         read  path
GET    /v1/search                                                read  seen
GET    /v1/summaries                                             read  seen
GET    /v1/tags                                                  read  seen
GET    /v1/groups                                                read  seen
GET    /v1/groups/{tag}                                          read  seen
GET    /v1/storage                                               read  seen
GET    /v1/runs/{run}/summary                                    read  path
GET    /v1/overview                                              read  seen
GET    /v1/alerts                                                read  seen
PUT    /v1/runs/{run}/alerts/{code}/acknowledgement              write path json
DELETE /v1/runs/{run}/alerts/{code}/acknowledgement              write path
PUT    /v1/alerts/{code}/{subject}/acknowledgement               admin all  json
DELETE /v1/alerts/{code}/{subject}/acknowledgement               admin all
POST   /v1/replicas/{tier}/retry                                 admin all
GET    /v1/runs/{run}/policy                                     read  path
PUT    /v1/runs/{run}/policy                                     admin path json
GET    /v1/runs/{run}/retention                                  read  path
PUT    /v1/runs/{run}/checkpoints/{step}/pin                     write path
DELETE /v1/runs/{run}/checkpoints/{step}/pin                     write path
PUT    /v1/runs/{run}/checkpoints/{step}/labels/{label}          write path
DELETE /v1/runs/{run}/checkpoints/{step}/labels/{label}          write path
DELETE /v1/runs/{run}/checkpoints/{step}                         admin path
GET    /v1/runs/{run}/checkpoints/{step}/replicas                read  path
GET    /v1/runs/{run}/checkpoints/{step}/replicas/{tier}         read  path
GET    /v1/runs/{run}/checkpoints/{step}/manifest                read  path
GET    /v1/runs/{run}/checkpoints/{step}/tensors                 read  path
GET    /v1/runs/{run}/checkpoints/{step}/files                   read  path
GET    /v1/runs/{run}/checkpoints/{step}/files/{name}            read  path
HEAD   /v1/runs/{run}/checkpoints/{step}/files/{name}            read  path
GET    /v1/runs/{run}/compare                                    read  path
GET    /v1/runs/{run}/checkpoints/{step}/statistics              read  path
GET    /v1/runs/{run}/checkpoints/{step}/histogram               read  path
GET    /v1/runs/{run}/layers                                     read  path
GET    /v1/runs/{run}/checkpoints/{step}/shard                   read  path
HEAD   /v1/runs/{run}/checkpoints/{step}/shard                   read  path
PUT    /v1/ranks/{rank_id}                                       write body json
DELETE /v1/ranks/{rank_id}                                       write rank
PUT    /v1/ranks/{rank_id}/segment                               write rank json
PUT    /v1/ranks/{rank_id}/uploads/{number}                      write rank json
GET    /v1/ranks/{rank_id}/uploads/{number}                      read  rank
PUT    /v1/ranks/{rank_id}/uploads/{number}/{part}               write rank octets
POST   /v1/ranks/{rank_id}/uploads/{number}/seal                 write rank json
POST   /v1/ranks/{rank_id}/uploads/{number}/abandon              write rank json
GET    /v1/ranks/{rank_id}/outcomes                              read  rank
PUT    /v1/ranks/{rank_id}/waiting                               write rank json
PUT    /v1/ranks/{rank_id}/stopping                              write rank json
PUT    /v1/ranks/{rank_id}/choices/{turn}                        write rank json
PUT    /v1/ranks/{rank_id}/choices/{turn}/end                    write rank json
GET    /v1/tokens                                                admin all
POST   /v1/tokens                                                admin all  json
POST   /v1/tokens/{name}/rotate                                  admin all  json
DELETE /v1/tokens/{name}                                         admin all
GET    /v1/quotas                                                read  seen
PUT    /v1/quotas/{pattern}                                      admin all  json
DELETE /v1/quotas/{pattern}                                      admin all
GET    /v1/views                                                 read  none
PUT    /v1/views/{name}                                          admin all  json
DELETE /v1/views/{name}                                          admin all
GET    /v1/whoami                                                read  none
GET    /v1/audit                                                 admin seen
GET    /v1/rounds                                                read  seen
GET    /v1/nodes                                                 read  seen
DELETE /v1/nodes/{name}                                          admin all
POST   /v1/nodes/secret                                          admin all
GET    /v1/watched/daemons                                       read  seen
GET    /v1/watched/runs                                          read  seen
GET    /v1/notifications                                         admin all
POST   /v1/notifications/{name}/test                             admin all
GET    /healthz                                                  open  none
GET    /readyz                                                   open  none
GET    /metrics                                                  read  seen
GET    /v1/catalog/check                                         admin all
POST   /v1/jobs                                                  write body json
GET    /v1/jobs                                                  read  seen
GET    /v1/jobs/{job_id}                                         read  seen
DELETE /v1/jobs/{job_id}                                         write seen
GET    /v1/events                                                read  seen
GET    /                                                         read  seen
POST   /views                                                    admin all  form
POST   /views/{name}/remove                                      admin all  form
GET    /runs/{run}                                               read  path
GET    /runs/{run}/saves                                         read  path
GET    /runs/{run}/about                                         read  path
POST   /runs/{run}/about                                         write path form
POST   /runs/{run}/life                                          write path form
GET    /runs/{run}/rename                                        read  path
POST   /runs/{run}/rename                                        admin path form
GET    /runs/{run}/delete                                        read  path
POST   /runs/{run}/delete                                        admin path form
POST   /runs/{run}/undelete                                      admin path form
GET    /runs/{run}/purge                                         read  path
POST   /runs/{run}/purge                                         admin path form
GET    /trash                                                    read  seen
GET    /runs/{run}/policy                                        read  path
GET    /compare                                                  read  seen
POST   /runs/{run}/alerts/{code}                                 write path form
POST   /runs/{run}/mend                                          write path form
POST   /alerts/{code}/{subject}                                  admin all  form
POST   /runs/{run}/policy/preview                                read  path form
POST   /runs/{run}/policy                                        admin path form
GET    /runs/{run}/compare                                       read  path
POST   /runs/{run}/compare                                       write path form
GET    /runs/{run}/checkpoints/{step}                            read  path
GET    /runs/{run}/checkpoints/{step}/files                      read  path
GET    /runs/{run}/checkpoints/{step}/map/{name}                 read  path
GET    /runs/{run}/checkpoints/{step}/extents                    read  path
GET    /runs/{run}/checkpoints/{step}/histogram                  read  path
GET    /runs/{run}/checkpoints/{step}/tensors                    read  path
GET    /runs/{run}/health                                        read  path
GET    /runs/{run}/checkpoints/{step}/restore                    read  path
POST   /runs/{run}/marks                                         write path form
POST   /runs/{run}/checkpoints/{step}/pin                        write path form
POST   /runs/{run}/checkpoints/{step}/labels                     write path form
POST   /runs/{run}/checkpoints/{step}/labels/{label}/remove      write path form
GET    /runs/{run}/checkpoints/{step}/remove                     read  path
POST   /runs/{run}/checkpoints/{step}/remove                     admin path form
POST   /runs/{run}/checkpoints/{step}/jobs                       write path form
GET    /nodes                                                    read  seen
POST   /nodes/{name}/forget                                      admin all  form
GET    /daemons                                                  read  seen
GET    /notifications                                            admin all
GET    /quotas                                                   read  seen
GET    /storage                                                  read  seen
POST   /quotas                                                   admin all  form
POST   /quotas/{pattern}/remove                                  admin all  form
POST   /notifications/{name}/test                                admin all  form
GET    /jobs                                                     read  seen
GET    /import                                                   read  seen
POST   /import                                                   write seen form
GET    /merge                                                    read  seen
POST   /merge                                                    write seen form
GET    /jobs/{job_id}                                            read  seen
POST   /jobs/{job_id}/cancel                                     write seen form
GET    /events                                                   read  seen
GET    /audit                                                    read  seen
GET    /tokens                                                   admin all
POST   /tokens                                                   admin all  form
POST   /tokens/{name}/rotate                                     admin all  form
POST   /tokens/{name}/revoke                                     admin all  form
GET    /api                                                      read  seen
POST   /v1/links                                                read  none
DELETE /v1/links                                                read  none
GET    /enter                                                   open  none
GET    /csv/{table}                                              read  seen
GET    /runs/{run}/csv/{table}                                   read  path
GET    /runs/{run}/checkpoints/{step}/csv/{table}                read  path
GET    /find                                                     read  seen
GET    /login                                                    open  none
POST   /login                                                    open  none form
POST   /logout                                                   read  none form
GET    /static/{name}                                            open  none
"""


class Route(NamedTuple):
    """A line of the table."""

    method: str
    path: str
    scope: str
    about: str
    body: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.method, self.path.replace("{name}", "{name:path}") if "static" in self.path else self.path

    @property
    def is_page(self) -> bool:
        return not self.path.startswith("/v1/") and self.path not in ("/healthz", "/readyz", "/metrics")

    def target(self, run: str) -> str:
        """The path about this run."""
        removes = (self.method == "DELETE" and self.path.endswith("{step}")) or self.path.endswith("/remove")
        deletes = (self.method, self.path) == ("DELETE", "/v1/runs/{run}")
        filled = self.path.format(
            run=f"{run}-gone" if deletes else run,
            step=GONE if removes else STEP,
            name="base.css" if "static" in self.path else "nobody" if "token" in self.path else "state.json",
            label="good",
            pattern="nobody",
            rank_id=RANKS.get(run, "d" * 32) if self.method != "DELETE" or run == FOREIGN else "c" * 32,
            code="run-died",
            subject="nobody",
            tag="a-tag",
            tier="nowhere",
            table="files" if "checkpoints" in self.path else "checkpoints" if "runs" in self.path else "jobs",
            number=0,
            part="data",
            turn=0,
            job_id=10**6,
        )
        return filled + ("?a=5&b=5" if self.path.endswith("/compare") else "")

    def sent(self, run: str) -> tuple[list[tuple[str, str]], bytes] | None:
        """Headers and body of a request that is as it should be; None where it has no body."""
        if not self.body:
            return None
        if self.body == "octets":
            data = b"12345678"
            headers = [("Content-Range", f"bytes 0-7/{len(data)}"), ("X-Content-Digest", f"xxh3-64={digest(data)}")]
            return headers, data
        if self.body == "form":
            return [("Content-Type", "application/x-www-form-urlencoded"), ("Sec-Fetch-Site", "same-origin")], b"a=b"
        return [("Content-Type", "application/json")], BODIES[self.path](run)


def hello(run: str, **more: Any) -> dict[str, Any]:
    return {"protocol": wire.PROTOCOL, "run": run, "rank": 0, "world": 1, "launch": "matrix", **more}


def _json(value: Any) -> Callable[[str], bytes]:
    from tests.attack.sockets import as_json

    return lambda run: as_json(value(run) if callable(value) else value)


BODIES: dict[str, Callable[[str], bytes]] = {
    "/v1/runs/{run}": _json({"notes": "as they are"}),
    "/v1/runs/{run}/policy": _json({"last": 3}),
    "/v1/runs/{run}/alerts/{code}/acknowledgement": _json({"for_s": 60}),
    "/v1/alerts/{code}/{subject}/acknowledgement": _json({}),
    "/v1/ranks/{rank_id}": _json(hello),
    "/v1/ranks/{rank_id}/segment": _json({"slots": 1, "data_bytes": 64, "table_bytes": 64}),
    "/v1/ranks/{rank_id}/uploads/{number}": _json({"step": 7}),
    "/v1/ranks/{rank_id}/uploads/{number}/seal": _json({"data_bytes": 8, "table_bytes": 0, "table_digest": "0" * 16}),
    "/v1/ranks/{rank_id}/uploads/{number}/abandon": _json({"problem": {"code": "round-aborted", "detail": "no"}}),
    "/v1/ranks/{rank_id}/waiting": _json({"step": 5}),
    "/v1/ranks/{rank_id}/stopping": _json({"passed": 5}),
    "/v1/ranks/{rank_id}/choices/{turn}": _json({"step": 5}),
    "/v1/ranks/{rank_id}/choices/{turn}/end": _json({"step": 5}),
    "/v1/tokens": _json({"name": "x y"}),  # a name that none may have
    "/v1/tokens/{name}/rotate": _json({}),
    "/v1/quotas/{pattern}": _json({"quota_bytes": 2**60}),
    "/v1/views/{name}": _json({"sort": "-storage"}),
    "/v1/jobs": _json(lambda run: {"kind": "verify", "run": run, "step": GONE}),
}
ROUTES = tuple(Route(*line.split()) for line in _TABLE.strip().splitlines())

# What no body here is: every one of these was, or might be, one thing to one reader and another to the next.
CONTENT_TYPES = (
    "application/x-www-form-urlencoded+json",
    "application/x-www-form-urlencoded-x+json",
    "APPLICATION/X-WWW-FORM-URLENCODED+JSON",
    "application/x-www-form-urlencoded; a=application/json",
    "application/x-www-form-urlencoded, application/json",
    "application/json, application/x-www-form-urlencoded",
    "application/json; charset=utf-16",
    "application/json; charset=utf-8; charset=utf-16",
    "application/vnd.holdfast+json",
    "application/merge-patch+json",
    "multipart/form-data; boundary=x",
    "text/plain",
    "text/plain; application/json",
    "application/json\tx",
    "*/*",
    "",
    ";",
)
TWICE = (
    ("Authorization", "OWN", "OWN"),
    ("Authorization", "OWN", "Bearer hf_x"),
    ("Authorization", "Bearer hf_x", "OWN"),
    ("Cookie", "a=b", "holdfast_token=hf_x"),
    ("Content-Length", "0", "7"),
    ("Content-Type", "application/json", "application/x-www-form-urlencoded"),
    ("Content-Type", "application/x-www-form-urlencoded", "application/json"),
    ("Content-Type", "application/json", "application/json"),
    ("Content-Encoding", "identity", "zstd"),
    ("Content-Range", "bytes 0-0/1", "bytes 0-1/2"),
    ("Host", "HOST", "HOST"),
    ("Origin", "http://HOST", "http://attacker.example"),
    ("Sec-Fetch-Site", "same-origin", "cross-site"),
    ("Range", "bytes=0-0", "bytes=1-1"),
    ("If-Match", "*", '"x"'),
    ("If-None-Match", "*", '"x"'),
    ("If-Range", '"x"', '"y"'),
    ("Last-Event-ID", "1", "2"),
    ("Transfer-Encoding", "chunked", "chunked"),
    ("X-Forwarded-Groups", "nobody", "ops"),
    ("X-Auth-Request-Email", "a@lab.example", "b@lab.example"),
    ("X-Content-Digest", "xxh3-64=" + "0" * 16, "xxh3-64=" + "1" * 16),
)
