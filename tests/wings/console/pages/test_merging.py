"""The form to merge: a dry run that says what would be made, the merge itself, and the ancestry on the result's page."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast_formats.rest.operations import Scope, TokenRequest
from holdfast_service.api.access.authentication import Policy
from tests.serving import Served, served
from tests.wings.console.pages.test_importing import job_page
from tests.wings.console.reading import Page

RECIPE = """merge_method: linear
models:
  - {model: math@1, parameters: {weight: 0.25}}
  - {model: secret@1, parameters: {weight: 0.75}}
  - {model: ./model, parameters: {weight: [1, 0.5]}}
# <script>
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that wants tokens, with runs `math` and `secret`, and a directory to merge from."""
    place = tmp_path_factory.mktemp("merging")
    (place / "root").mkdir()
    for number, name in enumerate(("model", "math", "secret")):
        source = place / "place" / name
        source.mkdir(parents=True)
        save_file({"w": np.full((3, 4), number, np.float32)}, source / "model.safetensors", metadata={"format": "pt"})
    with served(place / "root", place / "place", access=Policy(tokens=True)) as running:
        with viewer(running, "maker", "admin", "*") as made:
            for name in ("math", "secret"):
                for step in ("1", "2"):
                    job_page(made, made.post("/import", data={"from": name, "run": name, "step": step}))
        yield running


def viewer(service: Served, name: str, scope: Scope, runs: str) -> httpx.Client:
    token = service.services.tokens.create(TokenRequest(name=name, scope=scope, runs=runs)).token
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=service.url, trust_env=False, follow_redirects=True, headers=headers)


@pytest.fixture(scope="module")
def browser(service: Served) -> Iterator[httpx.Client]:
    with viewer(service, "admin", "admin", "*") as client:
        yield client


def test_a_dry_run_and_then_the_merge(service: Served, browser: httpx.Client) -> None:
    """The plan names the sources and the recipe; the page's own button merges the same; then the ancestry is drawn."""
    fields = {"recipe": RECIPE, "run": "mixed", "step": "0"}
    page = job_page(browser, browser.post("/merge", data={**fields, "dry_run": "yes"}))
    for part in ("What would become of what", "secret@1", "./model", "merged by linear", "So far nothing", "<script>"):
        assert part in page.text
    assert not (service.root / "mixed").exists()
    inputs = [element.attributes for element in page.all("input") if element.attributes.get("type") == "hidden"]
    sent = {str(one["name"]): str(one["value"]) for one in inputs}
    assert sent == fields
    assert "Go to the checkpoint" in job_page(browser, browser.post("/merge", data=sent)).text
    shown = Page(browser.get("/runs/mixed/checkpoints/0").text)
    assert shown.faults() == []
    for part in ("Merged by linear, mergekit dialect, seed 0", "math@1", "weight 0.25", "weight 1, 0.5", "a directory"):
        assert part in shown.text
    assert "/runs/secret/checkpoints/1" in [one.attributes.get("href") for one in shown.all("a")]
    grandchild = "{merge_method: passthrough, models: [{model: mixed@0}]}"
    job_page(browser, browser.post("/merge", data={"recipe": grandchild, "run": "copy", "step": "0"}))
    assert "merged by linear" in (text := Page(browser.get("/runs/copy/checkpoints/0").text).text) and "math@1" in text


def test_the_mean_of_a_run(browser: httpx.Client) -> None:
    """Its newest checkpoints are named in the recipe that the job gets."""
    answer = browser.post("/merge", data={"averaged": "math", "last": "2", "run": "mean", "step": "3"})
    assert "math@2" in job_page(browser, answer).text
    assert browser.get("/v1/runs/mean/checkpoints/3").json()["verified"]


def test_what_is_missing_or_cannot_be_is_said(browser: httpx.Client) -> None:
    fields = {"recipe": RECIPE, "run": "other", "step": "1"}
    before = len(browser.get("/v1/jobs").json()["items"])
    for change, says in (
        ({"recipe": ""}, "'recipe' is empty"),
        ({"run": ""}, "'run' is empty"),
        ({"step": "one"}, "not a whole number"),
        ({"averaged": "math", "last": "1"}, "give only one of them"),
        ({"recipe": "", "averaged": "math", "last": "9"}, "2 sound checkpoints"),
        ({"recipe": RECIPE.replace("linear", "liner")}, "did you mean linear"),
        ({"recipe": RECIPE.replace("secret@1", "secret@7")}, "no checkpoint secret@7"),
    ):
        answer = browser.post("/merge", data={**fields, **change})
        assert answer.status_code in (400, 404) and says in Page(answer.text).text, says
    assert len(browser.get("/v1/jobs").json()["items"]) == before


def test_runs_that_a_viewer_may_not_read_are_not_named(service: Served, browser: httpx.Client) -> None:
    """Neither on the page of the job or the checkpoint, nor by the API, nor in events; who may read them sees all."""
    answer = browser.post("/merge", data={"recipe": RECIPE, "run": "mixed-2", "step": "0"})
    job_page(browser, answer)
    number = str(answer.url).rpartition("/")[2]
    for name, runs, told in (("few", "m*", False), ("many", "*", True)):
        with viewer(service, name, "read", runs) as shown:
            for path in (f"/jobs/{number}", f"/v1/jobs/{number}", "/v1/jobs", "/v1/events", "/runs/mixed-2/checkpoints/0"):
                answer = shown.get(path)
                assert answer.status_code == 200, path
                assert ("secret" in answer.text) == told, path
