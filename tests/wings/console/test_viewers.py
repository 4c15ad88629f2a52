"""What a page offers to whom: each form and each link that leads to a change is shown to those who may do it, and to nobody
else; and every page says whom the service takes its viewer for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from holdfast_formats.rest.views import ViewRequest
from holdfast_service.api.access.authentication import Policy
from holdfast_service.control.database.schema import JobRow
from tests.api.guarded import Guarded, guarded
from tests.checkpoints import build_root
from tests.wings.console.reading import Page

CHECKPOINT = "/runs/team-a/checkpoints/5"
REMOVAL = "/runs/team-a/checkpoints/3/remove"
PAGES = (
    "/",
    "/runs/team-a",
    "/runs/team-a/policy",
    "/runs/team-a/about",
    "/runs/team-a/rename",
    "/runs/team-a/delete",  # which says why not now: a job is about it
    "/runs/team-a/health",
    "/runs/team-a/compare?a=5&b=5",  # not of step 3: one that is being read is not removed
    CHECKPOINT,
    f"{CHECKPOINT}/files",
    f"{CHECKPOINT}/tensors",
    f"{CHECKPOINT}/restore",
    REMOVAL,
    "/nodes",
    "/jobs",
    "/import",
    "/merge",
    "/trash",
    "/compare",
    "/events",
    "/quotas",
    "/audit",
    "/tokens",
    "/api",
)
WRITES = {"/runs/team-a/checkpoints/3/pin", f"{CHECKPOINT}/pin", f"{CHECKPOINT}/labels", f"{CHECKPOINT}/jobs"}
WRITES |= {f"/runs/team-a/{what}" for what in ("marks", "life", "about")}
CHANGES_RUN = {f"/runs/team-a/{what}" for what in ("policy/preview", "rename")} | {REMOVAL}
READS_ALL = {"/runs/team-a/compare"}  # by a job, which reads any run
CHANGES_ALL = {
    "/quotas",
    "/quotas/team-*/remove",
    "/views",
    "/views/with NaN/remove",
    "/import",
    "/merge",
    "/tokens",
    "/tokens/NAME/revoke",
    "/tokens/NAME/rotate",
}
LINKS = {"/tokens": "all", "/audit": "some", "/import": "all", f"{CHECKPOINT}/remove": "run"}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("viewed")
    build_root(root, {"team-a": (3,)})  # an older one, which may be removed
    with guarded(root, Policy(tokens=True)) as made:
        services = made.running.services
        services.team_quotas.set("team-*", 10**9)
        services.views.put("with NaN", ViewRequest(q="team"))
        with services.control.catalog.database.write() as session:
            for kind, run in (("verify", "team-a"), ("scrub", None), ("export", "team-a")):
                job = JobRow(kind=kind, key=kind, state="running", run=run, step=5, request={"kind": kind})
                job.cancel, job.done_bytes, job.total_bytes, job.node, job.tries = False, 0, 0, "another", 1
                job.created = job.seen = services.control.events.now()
                session.add(job)
        yield made


def offered(guard: Guarded, token: str) -> tuple[set[str], set[str], dict[str, str]]:
    """The forms that post something, the links, and the text, of all pages."""
    forms: set[str] = set()
    links: set[str] = set()
    texts: dict[str, str] = {}
    for path in PAGES:
        answer = guard.ask("GET", path, token, headers={"Accept": "text/html"})
        page = Page(answer.text)
        assert page.faults() == [], path
        texts[path] = page.text
        links |= {at.partition("?")[0] for at in page.addresses()}
        for form in page.all("form"):
            if form.attributes.get("method") == "post":
                buttons = [e for e in page.all("button") if "form" in e.inside]
                if path == "/runs/team-a/policy" and "needs the scope admin" in page.text:
                    continue  # it shows what is in force
                assert buttons, path
                forms.add(re.sub(r"(?<=/tokens/)[^/]+", "NAME", unquote(form.attributes.get("action", path))))
    return forms, links, texts


@pytest.mark.parametrize(
    ("scope", "runs", "may"),
    [
        ("read", "*", set()),
        ("read", "team-a", set()),
        ("write", "team-a", WRITES),
        ("write", "team-*", WRITES),
        ("admin", "team-a", WRITES | CHANGES_RUN),
        ("write", "*", WRITES | READS_ALL),
        ("admin", "*", WRITES | READS_ALL | CHANGES_RUN | CHANGES_ALL),
    ],
)
def test_nothing_is_offered_that_would_be_refused(guard: Guarded, scope: str, runs: str, may: set[str]) -> None:
    """Each page, for each scope, of one's own run and of all: exactly the forms that the API would do for its viewer."""
    token = guard.token(scope, runs)  # type: ignore[arg-type]
    name = guard.running.services.tokens.verify(token).name
    forms, links, texts = offered(guard, token)
    cancels = {form for form in forms if form.endswith("/cancel")}
    assert forms - cancels == may
    kinds = {guard.ask("GET", f"/v1/jobs/{form.split('/')[2]}", token).json()["kind"] for form in cancels}
    wanted = {"verify"} if "pin" in "".join(may) else set()
    wanted |= {"scrub"} if (scope, runs) == ("write", "*") else {"scrub", "export"} if "/import" in may else set()
    assert kinds == wanted
    shown = {link for link in LINKS if link in links}
    assert shown == {link for link, needs in LINKS.items() if scope == "admin" and (runs == "*" or needs in ("some", "run"))}
    assert all(f"signed in as {name} {scope}" in text for text in texts.values())


def test_nobody_is_signed_in_at_the_sign_in_page(guard: Guarded) -> None:
    """It names nobody, and has no page to go to that asks for more."""
    page = Page(guard.ask("GET", "/login").text)
    assert page.faults() == [] and "signed in as" not in page.text and "/tokens" not in page.addresses()
