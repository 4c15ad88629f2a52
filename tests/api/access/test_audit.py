"""The audit log: that every change and every refusal is in it, of whoever it was, and nothing that is secret."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import iter_route_contexts

from holdfast_formats.rest.access import AUDITED, AuditEntry
from holdfast_service.api.access import audit as trails
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.access.authorization import SAFE, Declarations
from holdfast_service.api.access.refusals import REPORTS_A_MINUTE_MAX
from holdfast_service.control.access.audit import Act
from tests.api.guarded import CHECKPOINT, Guarded, code, guarded
from tests.attack.matrix import OWN, ROUTES

FORM = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("audited"), Policy(tokens=True)) as made:
        yield made


def entries(guard: Guarded, token: str, **asked: str) -> list[AuditEntry]:
    found = guard.ask("GET", "/v1/audit", token, params=asked).json()["items"]
    return [AuditEntry.model_validate(item) for item in found]


def test_every_route_that_changes_something_has_a_name(closed: Guarded) -> None:
    """A route that is added is recorded in any case; it declares its name, which `AUDITED` describes, too."""
    app = closed.running.app
    unnamed = []
    for route in iter_route_contexts(app.routes):
        for method in set(route.methods or ()) - SAFE:
            path = str(route.path).replace("{step}", "5").replace("{", "").replace("}", "")
            kind = kind_of(app.state.declarations, method, path)
            if kind == trails.OTHER:
                unnamed.append(f"{method} {route.path}")
            if kind is not None:
                assert kind in AUDITED
    assert unnamed == [], "declare `act` in needs(…) of these routes"
    assert kind_of(app.state.declarations, "PATCH", "/v1/what-nobody-has-thought-of") == trails.OTHER


def kind_of(declarations: Declarations, method: str, path: str) -> str | None:
    return trails.act_of(declarations.of(method, path, b""), path)


def test_every_kind_is_documented() -> None:
    """The table of the API's document is the one in the code."""
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text.partition("## Audit")[2].partition("## Lists")[0], re.MULTILINE)
    assert dict(listed) == AUDITED


def test_every_route_and_method_leaves_its_trace(closed: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, by somebody who may do everything and by one who may only read: each change is there once, by its author,
    and each refusal; reading what one may read is not.
    """
    seen: list[Act] = []
    audit = closed.running.services.audit
    add = audit.add
    monkeypatch.setattr(audit, "add", lambda act: (seen.append(act), add(act)))
    tokens = {closed.running.services.tokens.verify(token).name: token for token in map(closed.token, ("admin", "read"))}
    for route in ROUTES:
        if route.path in ("/login", "/enter"):
            continue
        target = route.target(OWN)  # a run that is not there
        kind = kind_of(closed.running.app.state.declarations, route.method, target.partition("?")[0])
        headers, body = route.sent(OWN) or ([], None)
        for name, token in tokens.items():
            _throttles(closed)
            seen.clear()
            answer = closed.ask(route.method, target, token, headers=dict(headers), content=body)
            refused = answer.status_code in (401, 403)
            if route.is_page:  # what it has asked the API for is recorded, and nothing twice
                assert len({act.request for act in seen}) <= 1 and all(act.via == "dashboard" for act in seen), (route, seen)
                assert not refused or seen, route
            elif refused or kind is not None:
                ((who, status, via),) = [(act.who, act.status, act.via) for act in seen]
                assert (who, status, via) == (name, answer.status_code, "http"), (route, seen)
            else:
                assert seen == [], (route, answer)
            assert all(act.request == answer.headers["x-request-id"] for act in seen), (route, seen)


def test_what_is_told_of_a_change(closed: Guarded) -> None:
    """Who, from where, about what, and how it ended; a token's text and the body of what was set are nowhere."""
    admin, ops = closed.token("admin"), closed.token("admin", "*")
    name = closed.running.services.tokens.verify(ops).name
    assert closed.ask("PUT", f"{CHECKPOINT}/labels/good", ops).status_code == 204
    made = closed.ask("POST", "/v1/tokens", ops, json={"name": "secret-holder", "runs": "s3cret-*"})
    assert closed.ask("PUT", f"{CHECKPOINT[:-1]}77/pin", ops).status_code == 404
    assert closed.ask("DELETE", f"{CHECKPOINT}?dry_run=true&force=newest-verified", ops).status_code < 500
    told = entries(closed, admin, who=name)
    assert [(one.kind, one.run, one.step, one.target, one.status) for one in told] == [
        ("pin-set", "team-a", 77, None, 404),
        ("token-created", None, None, "secret-holder", 201),
        ("label-set", "team-a", 5, "good", 204),
    ]
    assert {(one.address, one.by, one.via) for one in told} == {("127.0.0.1", "token", "http")}
    text = closed.ask("GET", "/v1/audit?limit=1000", admin).text
    assert made.json()["token"] not in text and admin not in text and "s3cret" not in text
    assert told[0].code == "no-such-checkpoint" and told[0].request


def test_what_only_looks_like_a_rehearsal_is_told_of(closed: Guarded) -> None:
    """Routes that do not know `dry_run` change something all the same."""
    admin, ops = closed.token("admin"), closed.token("admin")
    name = closed.running.services.tokens.verify(ops).name
    assert closed.ask("PUT", f"{CHECKPOINT}/pin?dry_run=true", ops).status_code == 204
    assert closed.ask("POST", "/v1/tokens?dry_run=1", ops, json={"name": "hidden"}).status_code == 201
    assert closed.ask("DELETE", "/v1/tokens/hidden?dry_run=1", ops).status_code == 204
    assert closed.ask("DELETE", f"{CHECKPOINT}/pin", ops).status_code == 204
    assert closed.ask("DELETE", f"{CHECKPOINT}?dry_run=false&dry_run=1&force=newest-verified", ops).status_code in (200, 409)
    told = [one.kind for one in entries(closed, admin, who=name)]
    assert told == ["pin-removed", "token-revoked", "token-created", "pin-set"]


@pytest.mark.parametrize("ending", ["%0A", "%0D", "%1B[31m", "%E2%80%AE", "%C2%85"])
def test_a_path_is_one_for_the_door_and_for_the_route(closed: Guarded, ending: str) -> None:
    """A newline at the end is a route's to ignore: the access check would take the request for another one, or for none."""
    admin = closed.token("admin")
    for method, path in (("PUT", f"{CHECKPOINT}/pin"), ("GET", "/v1/tokens"), ("DELETE", "/v1/tokens/x")):
        assert code(closed.ask(method, path + ending, admin)) == (400, "invalid-request")


def test_an_entry_is_one_line(closed: Guarded) -> None:
    """Whatever somebody has sent: no line of its own in a terminal or a file, and no control of either."""
    admin = closed.token("admin")
    for text in ("a\n2030-01-01 root token-created", "\x1b[2J", "\u202egnp", "\n=1+1"):
        assert closed.ask("POST", "/v1/jobs", admin, json={"kind": text}).status_code == 400
        _throttles(closed)
    targets = [one.target or "" for one in entries(closed, admin, kind="job-submitted")][:4]
    assert len(set(targets)) == 4 and all(target.isprintable() for target in targets)
    assert "\x1b" not in closed.ask("GET", "/v1/audit?format=csv", admin).text


def test_nobody_spends_what_others_are_told_of(closed: Guarded) -> None:
    """An enemy without a token fails at everything, in all ways; what the next one fails at is recorded at once."""
    admin, reader = closed.token("admin"), closed.token("read")
    trail = closed.running.app.state.trail
    _throttles(closed)
    assert sum(trail._throttle.due((str(number),), "") is not None for number in range(200)) == REPORTS_A_MINUTE_MAX
    assert closed.ask("PUT", f"{CHECKPOINT}/pin", reader).status_code == 403
    assert entries(closed, admin, refused="true")[0].who == closed.running.services.tokens.verify(reader).name
    _throttles(closed)


def test_secrets_in_a_path_are_not_kept(closed: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody revokes a token by its text: that is refused, and the text is not in the log."""
    admin, lost = closed.token("admin"), closed.token()
    assert closed.ask("DELETE", f"/v1/tokens/{lost[:60]}", admin).status_code == 404
    assert lost[:40] not in closed.ask("GET", "/v1/audit?kind=token-revoked", admin).text
    reader = closed.token()
    closed.running.services.refusals._throttle.reset()
    for method, path in (("DELETE", f"/v1/tokens/{lost[:60]}"), ("PUT", f"/v1/runs/{lost[:60]}/policy")):
        assert closed.ask(method, path, reader).status_code == 403
        closed.running.services.refusals._throttle.reset()
    assert "request-refused" in (told := closed.ask("GET", "/v1/events?kind=request-refused", reader).text)
    assert lost[:40] not in told and lost[:40] not in caplog.text and "hf_…" in caplog.text


def test_filters_pages_and_csv(closed: Guarded) -> None:
    """By author, run, kind, time and result; CSV has the same rows, and no cell that a spreadsheet computes."""
    admin, writer = closed.token("admin"), closed.token("write")
    name = closed.running.services.tokens.verify(writer).name
    for label in ("one", "two", "three"):
        assert closed.ask("PUT", f"/v1/runs/team-b/checkpoints/5/labels/{label}", writer).status_code == 204
    assert closed.ask("DELETE", "/v1/runs/team-b/checkpoints/5", writer).status_code == 403
    assert [one.target for one in entries(closed, admin, who=name, kind="label-set")] == ["three", "two", "one"]
    assert [one.kind for one in entries(closed, admin, who=name, refused="true")] == ["checkpoint-removed"]
    assert len(entries(closed, admin, who=name, run="team-b", refused="false")) == 3
    assert entries(closed, admin, who=name, since="2999-01-01T00:00:00Z") == []
    page = closed.ask("GET", "/v1/audit", admin, params={"who": name, "limit": 3}).json()
    assert len(page["items"]) == 3
    assert len(closed.ask("GET", "/v1/audit", admin, params={"who": name, "cursor": page["next"]}).json()["items"]) == 1
    for wrong in ({"kind": "nothing"}, {"since": "yesterday"}, {"cursor": "x"}, {"refused": "perhaps"}):
        assert code(closed.ask("GET", "/v1/audit", admin, params=wrong)) == (400, "invalid-request")
    closed.ask("GET", "/v1/audit", headers={"Authorization": "Bearer =cmd"})
    answer = closed.ask("GET", "/v1/audit", admin, params={"format": "csv", "who": name})
    assert answer.headers["content-type"].startswith("text/csv") and "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["target"] for row in rows] == ["", "three", "two", "one"] and rows[0]["code"] == "forbidden"


def test_an_admin_of_some_runs_sees_the_entries_about_these(closed: Guarded) -> None:
    """Neither those about other runs nor those about none; and whoever is no admin sees nothing."""
    writer = closed.token("write")
    for run in ("team-a", "team-b", "other"):
        closed.ask("PUT", f"/v1/runs/{run}/checkpoints/5/pin", writer)
    assert {one.run for one in entries(closed, closed.token("admin", "team-b"))} == {"team-b"}
    assert {one.run for one in entries(closed, closed.token("admin"))} >= {"team-a", "team-b", "other", None}
    assert code(closed.ask("GET", "/v1/audit", closed.token("write"))) == (403, "forbidden")


def test_what_a_page_did_is_its_viewers(closed: Guarded) -> None:
    """A form that the dashboard posts is one entry, with the browser's address and the name of its token."""
    admin, writer = closed.token("admin"), closed.token("write")
    name = closed.running.services.tokens.verify(writer).name
    cookie = {"Cookie": f"holdfast_token={writer}", **FORM}
    assert closed.ask("POST", "/runs/team-a/checkpoints/5/pin", headers=cookie).status_code == 303
    (told,) = entries(closed, admin, who=name)
    assert (told.kind, told.via, told.address, told.path) == ("pin-set", "dashboard", "127.0.0.1", f"{CHECKPOINT}/pin")


def test_a_form_that_another_site_sends_is_recorded(closed: Guarded) -> None:
    """The page is refused before it asks the API for anything, so its refusal is an entry of its own."""
    admin, writer = closed.token("admin"), closed.token("write")
    name = closed.running.services.tokens.verify(writer).name
    cookie = {"Cookie": f"holdfast_token={writer}", "Sec-Fetch-Site": "cross-site"}
    for path in ("/runs/team-a/checkpoints/5/pin", "/logout"):
        _throttles(closed)
        assert closed.ask("POST", path, headers=cookie).status_code == 403
        assert [(one.kind, one.path) for one in entries(closed, admin, who=name)][:1] == [("other", path)]


def test_signing_in_and_out_is_told(closed: Guarded) -> None:
    """By whom; a wrong token is a refusal of nobody's."""
    admin, token = closed.token("admin"), closed.token()
    name = closed.running.services.tokens.verify(token).name
    assert closed.ask("POST", "/login", data={"token": token}, headers=FORM).status_code == 303
    assert closed.ask("POST", "/login", data={"token": "hf_wrong"}, headers=FORM).status_code == 401
    link = closed.ask("POST", "/v1/links", token).json()["path"]
    assert closed.ask("GET", link).status_code == 200
    cookie = {"Cookie": f"holdfast_token={token}", **FORM}
    assert closed.ask("POST", "/logout", headers=cookie).status_code == 303
    assert closed.ask("GET", "/v1/runs", headers=cookie).status_code == 200  # the token is as good as before
    assert [one.kind for one in entries(closed, admin, who=name)] == ["signed-out", "signed-in", "link-made", "signed-in"]
    assert "" in {one.who for one in entries(closed, admin, kind="signed-in", refused="true")}
    assert "code=" not in closed.ask("GET", "/v1/audit?limit=1000", admin).text


def test_a_browser_that_signs_out_has_no_session_any_more(closed: Guarded) -> None:
    """Whoever has copied its cookie before is signed out too."""
    link = closed.ask("POST", "/v1/links", closed.token()).json()["path"]
    kept = closed.ask("GET", link).headers["set-cookie"].partition(";")[0]
    assert closed.ask("GET", "/v1/runs", headers={"Cookie": kept}).status_code == 200
    assert closed.ask("POST", "/logout", headers={"Cookie": kept, **FORM}).status_code == 303
    assert closed.ask("GET", "/v1/runs", headers={"Cookie": kept}).status_code == 401


def test_a_wrong_token_is_told_of_though_a_browser_is_led_away(closed: Guarded) -> None:
    """The answer is a redirect for whoever accepts pages; the attempt is recorded. Whoever shows nothing has made none."""
    admin = closed.token("admin")
    page = {"Accept": "text/html"}
    for headers, told in (({"Authorization": "Bearer hf_wrong", **page}, 1), (page, 0)):
        _throttles(closed)
        closed.running.services.audit.settle()
        before = entries(closed, admin, kind="read", refused="true")
        assert closed.ask("GET", "/v1/runs", headers=headers).status_code == 303
        assert len(entries(closed, admin, kind="read", refused="true")) == len(before) + told


def test_an_enemy_fills_nothing(closed: Guarded) -> None:
    """Of many attempts one a minute is recorded, with the number of those like it, and of all peers together a few."""
    admin, audit = closed.token("admin"), closed.running.services.audit
    _throttles(closed)
    before = audit.recorded + audit.waiting
    for _ in range(30):
        assert closed.ask("GET", "/v1/runs", "hf_wrong").status_code == 401
    audit.settle()
    assert audit.recorded + audit.waiting - before == 1
    reader = closed.token("read")
    for number in range(20):
        closed.ask("PUT" if number % 2 else "DELETE", f"/v1/runs/team-a/checkpoints/{number}/pin", reader)
    assert audit.recorded + audit.waiting - before == 3
    assert entries(closed, admin, refused="true")[0].who


def _throttles(guard: Guarded) -> None:
    """Let everything be told of again."""
    guard.running.app.state.trail._throttle.reset()
