"""Tables as files: the columns, the filters of their page, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.printable import visible_lines
from holdfast_formats.rest.columns import Listing
from holdfast_service.wings.console.pages.downloads import OF_ALL
from tests.wings.console.reading import Page

PATHS = [
    *(f"/csv/{name}" for name in OF_ALL),
    "/runs/tiny/csv/checkpoints",
    "/runs/tiny/csv/compare?a=5&b=10",
    *(f"/runs/tiny/checkpoints/5/csv/{name}" for name in ("files", "tensors")),
]


@pytest.mark.parametrize("path", PATHS)
def test_table(browser: httpx.Client, path: str) -> None:
    """A header, and as many rows as the list has."""
    answer = browser.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"].startswith('attachment; filename="')
    assert answer.headers["x-content-type-options"] == "nosniff"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert answer.text.count(",") >= 3
    if "checkpoints?" in path or path.endswith("csv/checkpoints"):
        assert [row["step"] for row in rows] == ["15", "10", "5"]
        assert {row["state"] for row in rows} == {"committed"}
        assert rows[0]["metrics"] == "loss=2.5" and rows[0]["groups"] == "model optim extra"


def test_filters(browser: httpx.Client) -> None:
    """The link on a page gives the rows of that page."""
    page = Page(browser.get("/runs/tiny?step_min=6&step_max=12").text)
    link = next(one for one in page.addresses() if "/csv/checkpoints" in one)
    assert [row["step"] for row in csv.DictReader(io.StringIO(browser.get(link).text))] == ["10"]
    json = next(one for one in page.addresses() if one.startswith("/v1/runs/tiny/checkpoints"))
    assert [item["step"] for item in browser.get(json).json()["items"]] == [10]
    assert browser.get("/csv/nothing").status_code == 404
    assert browser.get("/runs/nope/csv/checkpoints").status_code == 404


@given(
    st.text() | st.sampled_from(["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "a,b", 'a"b'])
)
def test_formulas_are_text(text: str) -> None:
    """What begins as a formula begins with an apostrophe; a number is a number, and everything else is what it was, but for
    characters that steer a terminal.
    """
    written = Listing[object](fields=("a", "b")).csv([{"a": text, "b": -1.5}])
    row = list(csv.reader(io.StringIO(written, newline="")))[1]
    assert row[1] == "-1.5"
    assert row[0] in (visible_lines(text), f"'{visible_lines(text)}")
    assert not row[0].startswith(("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20"))
    assert written.encode() and not set(written) & set("\x1b\x9b\x00\u202e")


def test_cells() -> None:
    """Lists, pairs and what is deeper."""
    made = Listing[object](fields=("a",)).csv(
        [{"a": ["x", "y"]}, {"a": {"loss": 2.5}}, {"a": [{"b": 1}]}, {"a": None}, {"a": True}, {"a": ["=x"]}]
    )
    assert [row[0] if row else "" for row in csv.reader(io.StringIO(made))] == [
        "a",
        "x y",
        "loss=2.5",
        '[{"b": 1}]',
        "",
        "true",
        "'=x",
    ]
