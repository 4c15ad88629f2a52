"""Places that are roots', runs' or checkpoints', where nothing else may be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.root_files import check_local, check_output_place, check_root_place


@pytest.fixture(params=[naming.ROOT_FILE, naming.LOCK])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A root that a daemon has served, or into which a command has imported; with one checkpoint."""
    step = tmp_path / "root" / naming.checkpoint_path("run", 5)
    step.mkdir(parents=True)
    for name in (naming.COMMIT, naming.MANIFEST):
        (step / name).touch()
    (tmp_path / "root" / request.param).touch()
    return tmp_path / "root"


@pytest.mark.parametrize(
    "below",
    [
        "run/checkpoints/step-00000006",
        "run/checkpoints/step-00000005/out",
        "run/staging/out",
        "run/out",
        "run/trash/a/b",
        "new/checkpoints/step-00000001",
        "new/staging/x",
    ],
)
def test_nothing_is_written_into_a_run(root: Path, tmp_path: Path, below: str) -> None:
    """It would be listed as a checkpoint of the run, swept, or keep a checkpoint from being removed; also through a link."""
    with pytest.raises(InvalidRequest, match="cannot be written"):
        check_output_place(root / below)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        check_output_place(tmp_path / "link" / below)


@pytest.mark.parametrize("below", ["root/exports/out", "root/out", "out", "checkpoints/out", "staging/x/y"])
def test_other_places_are_free(root: Path, tmp_path: Path, below: str) -> None:
    """Beside the runs, and outside of the root whatever a directory is called."""
    check_output_place(tmp_path / below)


@pytest.mark.parametrize("place", ["s3://bucket/place", "gs://b", "hf+ssh://b/p", "file:///tmp/x"])
def test_an_address_is_no_directory(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL is refused, also as a path, which has lost a slash; a directory of such a name has an absolute path."""
    monkeypatch.chdir(tmp_path)
    for check in (check_root_place, check_output_place):
        with pytest.raises(InvalidRequest, match="is a URL, not a directory") as caught:
            check(Path(place))
        assert "mount" in caught.value.hint
        check(tmp_path / "s3:" / "bucket")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["s3://key:hunter2@bucket/place", "https://key:hunt/er2@host"])
def test_an_address_with_a_password_is_not_shown(place: str) -> None:
    """The refusal ends in logs."""
    with pytest.raises(InvalidRequest, match="is a URL, not a directory") as caught:
        check_local(place)
    assert "er2" not in str(caught.value)


def test_a_checkpoint_without_a_root(tmp_path: Path) -> None:
    """An exported one is a checkpoint as well."""
    for name in (naming.COMMIT, naming.MANIFEST):
        (tmp_path / name).touch()
    with pytest.raises(InvalidRequest, match="a checkpoint"):
        check_output_place(tmp_path / "out")
    with pytest.raises(InvalidRequest, match="cannot be a root"):
        check_root_place(tmp_path / "out")
