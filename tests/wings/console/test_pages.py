"""Every page over a real root: what it says, that it fetches nothing from elsewhere, and that anybody can use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from sqlalchemy import Engine, event

from holdfast_formats import naming
from holdfast_service.config import RootPlace
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.insight import run_figures
from holdfast_service.wings.console import manifest_view
from holdfast_service.wings.console.pages.tensors import SORTED_THERE
from holdfast_service.wings.console.rendering import CSP
from tests.checkpoints import build, build_root
from tests.serving import Served, served

from .reading import Page

STEP = "/runs/tiny/checkpoints/5"
PAGES = {
    "/find?q=t": ("tiny", "other"),
    "/": ("tiny", "other", "Saves in progress"),
    "/?q=IN&sort=-name": ("tiny",),
    "/?metric=loss&sort=metric:loss": ("tiny", "loss", "2.5", "lowest loss first"),
    "/compare?run=tiny&run=other": ("loss of each checkpoint, by step", "Goodput lost"),
    "/compare?q=ti": ("loss of each checkpoint, by step", "tiny", "Lowest loss"),
    "/runs/tiny": ("Saves by step", "no rule limits what is kept", "20", "With the chosen ones: Compare", "not measured"),
    "/runs/tiny/about": ("Owner, tags and notes", "No launch has described itself"),
    "/runs/other/delete": ("Delete other?", "Type the run’s name to confirm"),
    "/runs/other/rename": ("Rename other?", "Change the name in your trainer too"),
    "/trash": ("The trash is empty", "when the disk is full"),
    "/runs/tiny/policy": ("A checkpoint stays if", "no rule limits what is kept", "Preview"),
    "/runs/tiny/health": ("Health by layer",),
    "/runs/tiny/compare": ("Compare step 10 with 15", "From step"),
    "/runs/tiny/compare?step=15&step=5": ("Compare step 5 with 15",),
    "/runs/tiny/compare?step=5": ("Compare step 5 with 10",),
    "/runs/other/compare": ("A comparison takes two checkpoints",),
    "/runs/tiny/compare?a=5&b=10": ("equal", "embed.weight", "Equal and changed follow from the digests"),
    "/runs/tiny/compare?a=5&b=10&q=q.weight&sort=bytes&exact=yes": ("layers.0.q.weight",),
    STEP: ("Read back after the commit", "Verify now", "Resume from here", "loss", "2.5", "Kept", "not checked yet"),
    "/runs/tiny/checkpoints/latest": ("Step 15", "Compare with 10"),
    f"{STEP}/files": ("model-00001-of-00002.safetensors", "map of its tensors", "COMMIT", "complete"),
    f"{STEP}/tensors": ("embed.weight", "BF16", "64×24", "scalar", "is embed.weight"),
    f"{STEP}/tensors?q=LAYERS+weight&sort=bytes": ("layers.0.q.weight", "tensors found"),
    f"{STEP}/map/model-00001-of-00002.safetensors": ("Saved by 2 ranks", "dp=2", "[Replicate()]"),
    f"{STEP}/extents?group=model&name=embed.weight": ("Extents", "1.0 kB", "[Replicate()]"),
    f"{STEP}/histogram?group=model&name=embed.weight": ("Step 5", "values", "at most"),
    f"{STEP}/histogram?group=model&name=embed.weight&minus=10": ("Change from step 10 to 5", "Step 10"),
    f"{STEP}/restore?tp=2&group=optim": ("2 ranks, group optim", "Reads ÷ needs"),
    f"{STEP}/restore?layout=&group=model": ("holdfast restore tiny@5", "import holdfast", "curl -f -o rank0.safetensors"),
    f"{STEP}/restore": ("Resume from step 5", "restore(step=5)", "marks 2 newer checkpoints", "Advanced"),
    "/runs/tiny/checkpoints/15/restore": ("Nothing is lost or left behind",),
    "/runs/other/checkpoints/1/remove": ("Remove step 1?", "Type the step to confirm"),
    "/nodes": ("node-1", "Catalog and storage answer"),
    "/daemons": ("Daemons", "This daemon watches no other daemon", "tiny"),
    "/notifications": ("Notifications", "This daemon sends no notifications"),
    "/storage": ("Storage", "tiny", "Free on the file system", "Last day", "Older", "95.8 kB"),
    "/storage?q=nobody": ("No run that contains “nobody” holds a checkpoint",),
    "/quotas": ("Quotas of teams", "No team has a quota", "Set a quota"),
    "/jobs": ("Jobs", "Import a checkpoint"),
    "/import": ("Import a checkpoint", "a Hugging Face model", "Dry run"),
    "/merge": ("Merge checkpoints", "a mergekit recipe", "its newest", "Dry run"),
    "/merge?run=tiny": ("Merge checkpoints",),
    "/events": ("Events",),
    "/events?order=kind": ("Events",),
    "/audit": ("Audit", "Nothing was changed yet", "CSV"),
    "/audit?who=nobody&kind=pin-set&refused=true": ("No entry matches",),
    "/tokens": ("Tokens",),
    "/api": ("API", "/openapi.json", "holdfast.Api"),
    "/login": ("Sign in", "Token"),
}


QUERIES_MAX = 10


@pytest.fixture(scope="module")
def service_to_read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service over two runs, one of them with a save under way and one that failed, which tests only read."""
    root = tmp_path_factory.mktemp("root")
    build_root(root, {"tiny": (5, 10, 15), "other": (1,)})
    with served(root) as running:
        catalog: Catalog = running.services.control.catalog
        failed = catalog.rounds.open("tiny", 17, 1, 2, "2026-01-02T00:00:00Z")[0]
        catalog.rounds.end(failed, "aborted", "2026-01-02T00:00:01Z", "no-space", "the <disk> is full")
        catalog.rounds.open("tiny", 20, 1, 2, "2026-01-02T00:00:02Z")
        while run_figures.renew(catalog.database):  # as the thread does that writes the catalog
            pass
        yield running


@pytest.fixture(scope="module")
def pages(service_to_read: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_to_read.url, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def engine(service_to_read: Served) -> Engine:
    return cast(Catalog, service_to_read.services.control.catalog).database.engine


@pytest.mark.parametrize("path", PAGES)
def test_page(pages: httpx.Client, path: str) -> None:
    """It answers, says what it is for, and has nothing that a reader, a keyboard, a phone or a strict CSP stumbles over."""
    got = pages.get(path)
    page = Page(got.text)
    assert got.status_code == 200, page.text
    assert got.headers["content-security-policy"] == CSP
    assert got.headers["cache-control"] == "no-store"
    assert page.faults() == []
    for part in PAGES[path]:
        assert part in page.text


@pytest.mark.parametrize("path", [*PAGES, "/v1/runs", "/v1/runs/tiny", "/v1/runs/tiny/summary", "/v1/summaries"])
def test_a_page_asks_the_catalog_few_questions(pages: httpx.Client, engine: Engine, path: str) -> None:
    """At most ten queries, however many runs and saves there are: what it shows of a run is one row."""
    pages.get(path)
    asked: list[str] = []

    def note(*given: Any) -> None:
        if not threading.current_thread().name.startswith("holdfast-job"):  # looks for work, whatever is asked
            asked.append(given[2])

    event.listen(engine, "before_cursor_execute", note)
    try:
        assert pages.get(path).status_code == 200
    finally:
        event.remove(engine, "before_cursor_execute", note)
    queries = [statement for statement in asked if statement.startswith("SELECT")]
    assert len(queries) <= QUERIES_MAX, "\n".join(queries)


def test_every_link_leads_somewhere(pages: httpx.Client) -> None:
    """Whatever a page of ours names on this service is there."""
    asked = {at for path in PAGES for at in Page(pages.get(path).text).addresses() if not at.startswith(("#", "?"))}
    forms = {e.attributes.get("action") for path in PAGES for e in Page(pages.get(path).text).all("form")}
    for address in sorted(asked - forms):
        got = pages.get(address)
        assert got.status_code in (200, 303), (address, got.text[:300])


def test_csp_allows_nothing_from_elsewhere() -> None:
    """Scripts and styles are files of this service; nothing inline, nothing evaluated, no frame, no form to elsewhere."""
    rules = dict(rule.strip().split(" ", 1) for rule in CSP.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in CSP


def test_runs_are_those_that_the_api_lists(pages: httpx.Client) -> None:
    """What was typed goes to the API, and the page has the runs that it answers, or says that there is none."""
    listed = [run["name"] for run in pages.get("/v1/runs", params={"q": "nobody"}).json()["items"]]
    page = Page(pages.get("/?q=nobody").text)
    assert ("/runs/other" in page.addresses()) == ("other" in listed)
    assert ("No run contains “nobody”" in page.text) == (not listed)


def test_failed_saves_say_why(pages: httpx.Client) -> None:
    """A save that became no checkpoint stands on the run's page with its reason, as text and not as markup."""
    got = pages.get("/runs/tiny").text
    assert "the <disk> is full" not in got
    assert "no-space the <disk> is full" in Page(got).text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/runs/nope", 404, "no-such-run"),
        ("/runs/nobody/purge", 404, "no-such-run"),
        ("/runs/tiny/checkpoints/6", 404, "no-such-checkpoint"),
        (f"{STEP}/map/nope.safetensors", 404, "no-such-resource"),
        (f"{STEP}/extents?group=model&name=nope", 404, "no-such-resource"),
        (f"{STEP}/extents", 400, "invalid-request"),
        ("/runs/tiny/checkpoints/newest", 400, "invalid-request"),
        ("/?cursor=%25", 400, "invalid-request"),
    ],
)
def test_errors_are_pages(pages: httpx.Client, path: str, status: int, said: str) -> None:
    """What cannot be shown is a page too, with the code, the hint and a way back."""
    got = pages.get(path)
    page = Page(got.text)
    assert (got.status_code, page.faults()) == (status, [])
    assert said in page.text
    assert "/" in page.addresses()


def test_a_path_that_is_not_there_is_a_page_for_browsers(pages: httpx.Client) -> None:
    """Programs get the problem as JSON, and so does whoever asks the API."""
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    got = pages.get("/no/such/page", headers=browser)
    page = Page(got.text)
    assert (got.status_code, page.faults(), got.headers["content-security-policy"]) == (404, [], CSP)
    assert "the path /no/such/page does not exist" in page.text and "/" in page.addresses()
    for path, headers in (("/no/such/page", {}), ("/v1/no/such", browser)):
        assert pages.get(path, headers=headers).json()["code"] == "no-such-resource"


def test_a_layout_that_does_not_parse_is_said_beside_the_form(pages: httpx.Client) -> None:
    """The form stays, with what was typed and what is wrong with it."""
    page = Page(pages.get(f"{STEP}/restore?tp=0&more=<x>").text)
    assert any(e.attributes.get("role") == "alert" for e in page.elements)
    assert "<x>" in [e.attributes.get("value") for e in page.all("input")]


def test_what_a_rank_holds_adds_up(pages: httpx.Client) -> None:
    """The bytes of each rank are those of the API's plan, and the lines to copy name layout, step and root."""
    page = Page(pages.get(f"{STEP}/restore?sharding=2&stage=stage3").text)
    plan = pages.get(
        f"/v1{STEP}/shard", params={"layout": "sharding=2:stage3", "rank": 1}, headers={"Accept": "application/json"}
    )
    titles = [e.attributes.get("title", "") for e in page.all("span")]
    assert f"{plan.json()['bytes']:,}".replace(",", "\u202f") + " bytes" in titles
    assert "--layout sharding=2:stage3 --all-ranks shards/" in page.text
    assert "shard?layout=sharding=2:stage3&rank=0&group=model" in page.text


def test_comparing_tells_equal_from_changed(tmp_path: Path) -> None:
    """Equal, changed, missing and reshaped are told from the manifests; reading the bytes says how far."""
    ones = {
        "model": {
            "same": np.ones(50, np.float32),
            "moved": np.ones(50, np.float32),
            "old": np.ones(3, np.float32),
            "form": np.ones(4),
        }
    }
    twos = {
        "model": {
            "same": np.ones(50, np.float32),
            "moved": np.full(50, 1.5, np.float32),
            "new": np.ones(3, np.float32),
            "form": np.ones((2, 3)),
        }
    }
    for step, arrays in ((1, ones), (2, twos)):
        build(tmp_path / naming.checkpoint_path("r", step), arrays, run="r", step=step)
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False) as client:
        text = Page(client.get("/runs/r/compare?a=1&b=2").text).text
        exact = Page(client.get("/runs/r/compare?a=1&b=2&exact=yes&state=changed").text).text
    for said in ("form reshaped", "moved changed", "same equal", "new missing-in-a", "old missing-in-b", "was F64 4"):
        assert said in text
    assert "moved changed" in exact
    assert "50 %" in exact


def test_many_tensors_can_be_sorted_by_what_was_measured(pages: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of many tensors are only asked for in an order, so that the list leads to each order before."""
    monkeypatch.setattr(manifest_view, "STATISTICS_MAX", 1)
    page = Page(pages.get(f"{STEP}/tensors?sort=bytes").text)
    for order in SORTED_THERE:
        assert [link for link in page.addresses() if f"sort={order}" in link], order


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Names of tensors can be anything: no page makes markup, a script or another address of them."""
    name = "</script><script>alert(1)</script>\"'&?#/../x"
    build(tmp_path / naming.checkpoint_path("r", 1), {"model": {name: np.ones(2, np.float32)}}, run="r", step=1)
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False) as client:
        for path in ("/tensors", "/map/model.safetensors", "/files"):
            page = Page(client.get(f"/runs/r/checkpoints/1{path}").text)
            assert page.faults() == []
        listed = Page(client.get("/runs/r/checkpoints/1/tensors").text)
        (link,) = [at for at in listed.addresses() if "extents" in at]
        assert name in listed.text
        assert name in Page(client.get(link).text).text


def test_hostile_addresses_stay_text(pages: httpx.Client) -> None:
    """What stands in an address comes back as text, in fields and in links."""
    for path in (
        "/?q=<script>alert(1)</script>",
        f"{STEP}/tensors?q=<script>&sort=<script>&group=<b>",
        "/runs/<script>",
        "/events?run=<i>",
    ):
        got = pages.get(path)
        assert "<script>alert" not in got.text
        assert "<b>" not in got.text
        assert Page(got.text).faults() == []


def test_a_service_without_a_part_says_so(pages: httpx.Client) -> None:
    """Pages of what this service lacks are there and say that; they do not break."""
    for path in ("/runs/tiny/health", "/jobs", "/events", "/tokens"):
        answered = pages.get({"/runs/tiny/health": "/v1/runs/tiny/layers"}.get(path, f"/v1{path}")).status_code
        said = "not available here" in Page(pages.get(path).text).text
        assert said == (answered == 404), path


def test_a_root_without_runs_says_how_to_begin(tmp_path: Path) -> None:
    """The first page that a new user sees has the lines that fill it."""
    with served(tmp_path) as running:
        page = Page(httpx.get(running.url, trust_env=False).text)
    assert "No run has been saved here yet" in page.text
    assert "checkpointer.save(step)" in page.text


def test_what_was_given_to_the_service_is_text(tmp_path: Path) -> None:
    """The root's own name is not markup either."""
    with served(tmp_path, root=RootPlace("/data/<script>", Path("/data/<script>"))) as running:
        text = httpx.get(running.url, trust_env=False).text
    assert "<script>" not in text.replace("<script src=", "").partition("<footer>")[2]
    assert "&lt;script&gt;" in text


def test_looking_holds_nothing(service: Served, browser: httpx.Client) -> None:
    """A checkpoint that was looked at, on whatever page of it, is removed at once."""
    readers = service.services.control.rotation.readers
    for path in (
        STEP,
        *(path for path in PAGES if path.startswith((f"{STEP}/", "/runs/tiny/compare", "/runs/tiny/health"))),
    ):
        assert browser.get(path).status_code == 200
        assert readers.held("tiny") == {}, path
    assert browser.delete("/v1/runs/tiny/checkpoints/5").status_code == 204
