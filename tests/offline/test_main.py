"""The service's program for roots that no daemon serves, as `holdfast` calls it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast_formats.rest.offline import CatalogWork, OfflineWork, RootJob, TokenWork
from holdfast_formats.rest.operations import TokenRequest
from holdfast_service.offline.__main__ import main
from tests.job_requests import a_merge, an_import, request

ADDRESS = "http://bucket/place"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Invalid JSON"),
        ("{}", "act"),
        ('{"act": "fold"}', "'fold'"),
        ('{"act": "check"}', "check.root"),
        ('{"act": "job", "root": "x", "job": {"kind": "import", "run": "r", "step": 1}}', "needs 'from'"),
    ],
)
def test_what_it_does_not_understand_is_refused(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and what is wrong."""
    assert main(text) == 2
    problem = json.loads(capsys.readouterr().out)
    assert problem["code"] == "invalid-request" and says in problem["detail"], problem


@pytest.mark.parametrize(
    "work",
    [
        RootJob(root=ADDRESS, job=request("verify", "r", 1, repair=True)),
        RootJob(root=ADDRESS, job=an_import("r", 1, **{"from": "."})),
        RootJob(root=ADDRESS, job=a_merge("r", 1, "{}")),
        TokenWork(act="token-create", root=ADDRESS, create=TokenRequest(name="t")),
        CatalogWork(act="check", root=ADDRESS),
    ],
    ids=lambda work: work.act if isinstance(work, CatalogWork | TokenWork) else work.job.kind,
)
def test_a_root_is_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], work: OfflineWork
) -> None:
    """The program itself refuses it, whatever `holdfast` has looked at before: it would make a directory `s3:`."""
    monkeypatch.chdir(tmp_path)
    assert main(work.model_dump_json(by_alias=True)) == 2
    assert "is a URL" in json.loads(capsys.readouterr().out)["detail"]
    assert os.listdir(tmp_path) == []
