"""The measurement of shards: every case runs against a real daemon and real file servers, on small tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import shards


def test_every_case_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All bodies are equal and as long as they should be; the table has a line a case."""
    for name, small in (("HIDDEN", 64), ("INNER", 128), ("HEADS", 8), ("VOCABULARY", 256)):
        monkeypatch.setattr(shards, name, small)
    rows = shards.measure(tmp_path, 1, 2**18, list(shards.CASES))
    assert [row["case"] for row in rows] == list(shards.CASES)
    for row in rows:
        assert 2**17 < row["bytes"] < 2**20
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in row["seconds"].values())
    shards.show(rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
