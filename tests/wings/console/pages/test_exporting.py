"""The form on a checkpoint's page that exports it, and the report on the job's page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats import naming
from tests.checkpoints import build
from tests.serving import Served, served
from tests.wings.console.reading import Page

STEP = "/runs/tiny/checkpoints/5"
WEIGHTS = {"<b>w": np.arange(12, dtype=np.float32).reshape(3, 4)}
GROUPS = {"model": WEIGHTS, "ema": {name: array + 1 for name, array in WEIGHTS.items()}, "optim": {"<i>m": np.ones(3)}}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A service that may export, with a checkpoint whose names are hostile."""
    build(tmp_path / "root" / naming.checkpoint_path("tiny", 5), GROUPS)
    (tmp_path / "place").mkdir()
    with served(tmp_path / "root", tmp_path / "place") as running:
        yield running


def test_averages_go_out_and_the_report_says_what_stays(service: Served, browser: httpx.Client, tmp_path: Path) -> None:
    """The form offers what there is; the job's page names what was converted and left out."""
    page = Page(browser.get(STEP).text)
    assert page.faults() == []
    offered = {element.attributes.get("value") for element in page.all("option")}
    assert {"hf", "peft", "dcp", "paddle-uc", "paddle-flex", "ema"} <= offered and "master" not in offered
    fields = {"kind": "export", "to": "out", "as": "hf", "weights": "ema", "dtype": "float64", "layout": "", "program": ""}
    answer = browser.post(f"{STEP}/jobs", data=fields)
    path = urlsplit(str(answer.url)).path
    browser.get(f"/v1{path}", params={"wait_s": 20}).raise_for_status()
    done = Page(browser.get(path).text)
    assert done.faults() == []
    for part in ("What is in out", "1 tensors were converted from float32 to float64", "group optim (1 tensors)"):
        assert part in done.text
    found = load_file(tmp_path / "place" / "out" / "model.safetensors")
    assert np.array_equal(found["<b>w"], GROUPS["ema"]["<b>w"]) and found["<b>w"].dtype == np.float64


@pytest.mark.parametrize(("change", "says"), [({"as": "onnx"}, "cannot export"), ({"dtype": "int8"}, "int8")])
def test_what_cannot_be_is_said_at_once(browser: httpx.Client, change: dict[str, str], says: str) -> None:
    """No job is made."""
    answer = browser.post(f"{STEP}/jobs", data={"kind": "export", "to": "out", "as": "hf", **change})
    assert answer.status_code == 400 and says in Page(answer.text).text
