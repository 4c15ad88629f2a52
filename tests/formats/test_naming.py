"""naming: directory names both ways, and hostile names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

HOSTILE = ["", ".", "..", "../x", "a/b", "/a", "a\\b", "a\n", "\na", "a b", ".a", "-a", "a\0", "ä", "٣", "a" * 300, "*", "~"]


@given(st.integers(0, naming.STEP_MAX))
def test_a_checkpoints_directory_reads_back(step: int) -> None:
    """Every step has one directory name, which leads back to it and is no staging directory."""
    name = naming.step_directory(step)
    assert naming.parse_step_directory(name) == step
    assert naming.parse_staging_directory(name) is None


@given(st.integers(0, naming.STEP_MAX), st.integers(0, naming.ATTEMPT_MAX), st.integers(0, naming.ROUND_ID_MAX))
def test_a_staging_directory_reads_back(step: int, attempt: int, round_id: int) -> None:
    """Every step, attempt and round have one staging directory name, which is no checkpoint's."""
    name = naming.staging_directory(step, attempt, round_id)
    assert naming.parse_staging_directory(name) == (step, attempt, round_id)
    assert naming.parse_step_directory(name) is None


@given(st.from_regex(r"\D{0,5}(step|Step)?-?\d{1,16}(\.a\d{0,10})?(\.r\d{0,3})?\D{0,3}") | st.text(max_size=20))
def test_only_exact_names_are_read(name: str) -> None:
    """Whatever is parsed is spelled exactly as it would be written."""
    step = naming.parse_step_directory(name)
    assert step is None or naming.step_directory(step) == name
    staging = naming.parse_staging_directory(name)
    assert staging is None or naming.staging_directory(*staging) == name


@pytest.mark.parametrize(
    "name",
    [
        "old-step-5",
        "step-5",
        "step-00000005x",
        "step-000000005",
        "step-00000005.a1",
        "step-00000005\n",
        " step-00000005",
        "step--0000005",
        "step-٠٠٠٠٠٠٠٥",
        "step-0000000000000005",
        "step-1000000000000000",
        "STEP-00000005",
        "checkpoints/step-00000005",
        "",
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    """A directory that is nearly named like a checkpoint is not one."""
    assert naming.parse_step_directory(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "step-00000005",
        "step-00000005.a",
        "step-00000005.a01",
        "step-5.a1",
        "step-00000005.a1x",
        "step-00000005.a-1",
        "step-00000005.a1.r0",
        "step-00000005.r1",
    ],
)
def test_other_names_are_no_staging_directories(name: str) -> None:
    """Nor is a directory that is nearly named like a staging directory one."""
    assert naming.parse_staging_directory(name) is None


@pytest.mark.parametrize("step", [-1, naming.STEP_MAX + 1, True, 1.0, "5", None])
def test_impossible_steps_are_refused(step: Any) -> None:
    """Steps are whole numbers that fit their directory's name."""
    with pytest.raises(InvalidRequest, match="step must be"):
        naming.check_step(step)


@pytest.mark.parametrize(
    ("place", "what"),
    [
        *(((5, attempt), "attempt") for attempt in (-1, naming.ATTEMPT_MAX + 1)),
        *(((5, 1, round_id), "round") for round_id in (-1, naming.ROUND_ID_MAX + 1)),
    ],
)
def test_impossible_attempts_and_rounds_are_refused(place: tuple[int, ...], what: str) -> None:
    """One whose directory could not be read back, so that no sweep would know it, gets none."""
    with pytest.raises(InvalidRequest, match=f"{what} must be"):
        naming.staging_directory(*place)


@pytest.mark.parametrize("name", [*HOSTILE, "a" * 129, "catalog.sqlite", "catalog.sqlite-wal"])
def test_hostile_run_names_are_refused(name: str) -> None:
    """A run is a directory beside the catalog: no path, nothing hidden, nothing that is the service's own."""
    with pytest.raises(InvalidRequest, match="use 1 to 128"):
        naming.check_run(name)


@pytest.mark.parametrize("name", ["a", "Llama-3.1_8b", "0", "a" * 128, "catalog"])
def test_good_run_names_are_kept(name: str) -> None:
    """Letters, digits, dot, underscore and hyphen."""
    assert naming.check_run(name) == name


@pytest.mark.parametrize("name", [*HOSTILE, "A", "0", "_a", "a-b", "a.b", "a" * 65])
def test_hostile_group_names_are_refused(name: str) -> None:
    """A group begins a file's name, and the first hyphen or dot ends it."""
    with pytest.raises(InvalidRequest, match="group name"):
        naming.check_group(name)


@pytest.mark.parametrize(
    "name", [*HOSTILE, "COMMIT", "manifest.json", "state.json", "receipts", "x.safetensors", "model.safetensors.index.json"]
)
def test_hostile_asset_names_are_refused(name: str) -> None:
    """An asset is a plain file that is not one of the format's own."""
    with pytest.raises(InvalidRequest, match="asset name"):
        naming.check_asset(name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "_a", "a" * 255])
def test_good_asset_names_are_kept(name: str) -> None:
    """Names that tokenizers and configurations have."""
    assert naming.check_asset(name) == name
    assert naming.is_file_name(name)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_no_file_names(name: str) -> None:
    """No path, no hidden file, no control character."""
    assert not naming.is_file_name(name)


def test_shard_files_are_named_as_hugging_face_names_them() -> None:
    """One file has the group's name, several count from one; the index stands beside them."""
    assert naming.shard_file_name("model", 0, 1) == "model.safetensors"
    assert naming.shard_file_name("model", 0, 4) == "model-00001-of-00004.safetensors"
    assert naming.index_file_name("ema") == "ema.safetensors.index.json"
    for name in (naming.shard_file_name("model", 3, 4), naming.index_file_name("model")):
        assert naming.is_file_name(name)
    with pytest.raises(InvalidRequest):
        naming.shard_file_name("../x", 0, 1)
    with pytest.raises(InvalidRequest):
        naming.index_file_name("../x")


def test_paths_are_made_of_checked_names() -> None:
    """Where a checkpoint and an attempt's files stand below the root; a hostile run leads nowhere."""
    assert naming.checkpoint_path("run", 500) == "run/checkpoints/step-00000500"
    assert naming.staging_path("run", 500, 3) == "run/staging/step-00000500.a3"
    assert naming.Place("run", 500, 3, 9).path == "run/staging/step-00000500.a3.r9"
    for made in (lambda: naming.checkpoint_path("../x", 5), lambda: naming.staging_path("../x", 5, 1)):
        with pytest.raises(InvalidRequest):
            made()


def test_a_socket_is_told_from_another_of_the_same_path() -> None:
    """Inode and time of change make the name; either one being different makes another."""
    assert len({naming.socket_id(1, 2), naming.socket_id(1, 3), naming.socket_id(2, 2), naming.socket_id(12, 2)}) == 4


@given(st.integers(0, naming.STEP_MAX), st.integers(0, naming.ATTEMPT_MAX), st.integers(1, naming.ROUND_ID_MAX))
def test_keys_of_a_bucket_read_back(step: int, attempt: int, round_id: int) -> None:
    """The prefix of a place's files leads back to it, and no step's commit object is one."""
    place = naming.Place("run", step, attempt, round_id)
    parent, _, name = naming.data_path(place).rpartition("/")
    assert parent == "run/data" and naming.parse_data_directory("run", name) == place
    assert naming.commit_object_path("run", step) == f"run/commits/{naming.step_directory(step)}"
    assert naming.parse_data_directory("run", naming.step_directory(step)) is None


def test_files_in_a_bucket_need_a_round() -> None:
    """Otherwise two tries would have the same keys."""
    with pytest.raises(InvalidRequest):
        naming.data_path(naming.Place("run", 7, 1))
    assert naming.parse_data_directory("run", "step-00000007.a1") is None


@given(
    st.integers(0, naming.STEP_MAX),
    st.integers(0, naming.ATTEMPT_MAX),
    st.integers(1, naming.ROUND_ID_MAX),
    st.tuples(st.integers(0, naming.ATTEMPT_MAX), st.integers(0, 10**9)),
)
def test_marks_of_lines_read_back(step: int, attempt: int, round_id: int, line: tuple[int, int]) -> None:
    """Files and line; a mark's key begins with what lists all marks of its files, and of its run."""
    place = naming.Place("run", step, attempt, round_id)
    data = naming.data_directory(place)
    key = naming.line_mark("run", data, line)
    assert key.startswith(naming.line_marks("run", data)) and key.startswith(naming.line_marks("run"))
    name = key.removeprefix(naming.line_marks("run"))
    assert naming.parse_line_mark("run", name) == (place, line) and naming.parse_data_directory("run", name) is None


@pytest.mark.parametrize("end", ["", "~1", "~1.", "~01.2", "~1.-2", "~1.2x", "~1.2~3.4", "~1.2/x"])
def test_other_names_are_no_marks(end: str) -> None:
    """A name that is nearly one says nothing."""
    assert naming.parse_line_mark("run", f"step-00000007.a1.r5{end}") is None
    assert naming.parse_line_mark("run", "step-00000007~1.2") is None
