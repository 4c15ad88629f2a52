"""Old exports of a run are removed, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.integrations.trainers.export_places import LEDGER, ExportPlace


def exported(directory: Path, run: str, *steps: int) -> ExportPlace:
    place = ExportPlace(str(directory), run)
    for step in steps:
        (place.path(step) / "part").mkdir(parents=True)
        (place.path(step) / "part" / "model.safetensors").write_bytes(bytes(step))
        place.note(step)
    return place


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in directory.iterdir() if path.name != LEDGER)


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    place = exported(tmp_path, "run", 2, 4, 6, 8, 10)
    place.rotate(3, best=2)
    assert steps(tmp_path) == [2, 8, 10]
    exported(tmp_path, "run", 12).rotate(1, best=2)
    assert steps(tmp_path) == [2, 12]
    place.rotate(1, best=None)
    assert steps(tmp_path) == [12]


def test_what_is_not_of_the_run_stays(tmp_path: Path) -> None:
    exported(tmp_path, "other", 3)
    (tmp_path / "checkpoint-1").mkdir()
    exported(tmp_path, "run", 2, 4).rotate(1, best=None)
    assert steps(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize("change", ["added", "removed", "larger", "link"])
def test_what_has_changed_since_stays(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    place = exported(tmp_path, "run", 2, 4)
    file = place.path(2) / "part" / "model.safetensors"
    if change == "added":
        (place.path(2) / "notes.txt").write_text("mine")
    elif change == "larger":
        file.write_bytes(b"longer")
    else:
        file.unlink()
    if change == "link":
        os.symlink(tmp_path, file)
    place.rotate(1, best=None)
    assert steps(tmp_path) == [2, 4] and "is no longer what was exported" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", '{"run": 3}'])
def test_a_ledger_that_cannot_be_read_names_nothing(tmp_path: Path, text: str) -> None:
    place = exported(tmp_path, "run", 2, 4)
    (tmp_path / LEDGER).write_text(text)
    place.rotate(1, best=None)
    assert steps(tmp_path) == [2, 4]
