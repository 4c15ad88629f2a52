"""docs/durability.md says what holds, by whom, and which test breaks without it: all of them exist, and cite the number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

TREE = Path(__file__).resolve().parents[2]
SERVICE = TREE / "service" / "holdfast_service"
DOCUMENT = Path(__file__).parents[2] / "docs" / "durability.md"
ROOMS = (SERVICE, TREE / "client", TREE / "formats")
NUMBERS = [f"I{number}" for number in range(1, 11)]
FUTURE = "no such tier exists yet"
_ROW = re.compile(r"^\| (I\d+) \| (.+?) \| (.+?) \| (.*?) ?\|$", re.M)
_CITED = re.compile(r"`([^`]+)`")


class Row(NamedTuple):
    """An invariant as the document has it."""

    number: str
    holders: list[str]
    tests: list[str]
    future: bool


def rows() -> dict[str, Row]:
    found = _ROW.findall(DOCUMENT.read_text())
    return {
        number: Row(number, _CITED.findall(held_by), _CITED.findall(tests), FUTURE in held_by)
        for number, _, held_by, tests in found
    }


def holder(name: str) -> Path:
    """The module of a name such as `control/checkpoints/commit.py`, `holdfast/read/reader.py` or `formats/naming.py`."""
    if name.startswith("formats/"):
        return TREE / "formats" / "holdfast_formats" / name.removeprefix("formats/")
    return next((room / name for room in ROOMS if (room / name).exists()), SERVICE / name)


def test_every_invariant_is_stated() -> None:
    """I1 to I10, each once, and the same sentences' numbers in ARCHITECTURE.md."""
    assert list(rows()) == NUMBERS
    assert re.findall(r"^- \*\*(I\d+)\*\*", (TREE / "ARCHITECTURE.md").read_text(), re.M) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_every_invariant_is_cited_by_code_and_test(number: str) -> None:
    """The modules that hold it and the tests that break without it are there, and all of them name it."""
    row = rows()[number]
    word = re.compile(rf"\b{number}\b")
    if row.future:
        assert not row.tests, f"{number} has tests: say who holds it"
        return
    assert row.holders and row.tests
    for name in row.holders:
        assert word.search(holder(name).read_text()), f"{name} does not cite {number}"
    for cited in row.tests:
        path, _, function = cited.partition("::")
        text = (TREE / path).read_text()
        assert word.search(text), f"{path} does not cite {number}"
        assert not function or re.search(rf"^    def {function}\(|^def {function}\(", text, re.M), f"there is no {cited}"


def calls(pattern: str, but: set[str]) -> list[str]:
    """The modules of the service, other than these, in which a call of this kind stands."""
    found = {str(path.relative_to(SERVICE)) for path in SERVICE.rglob("*.py") if re.search(pattern, path.read_text())}
    return sorted(found - but)


def test_two_modules_publish_and_one_renames() -> None:
    """I2: only commit and removal ask the store for it; only the store moves what is under checkpoints/, and only storage
    renames, syncs and unlinks there.
    """
    assert calls(r"store\.commit\(", {"control/checkpoints/commit.py"}) == []
    assert calls(r"store\.remove\(", {"control/checkpoints/removal.py"}) == []
    # commit gives an export its name, outside of any root; whole runs, whose checkpoints are committed, move to the trash,
    # back from it, and to another name
    runs = {f"control/retention/{name}.py" for name in ("run_trash", "run_renaming")}
    assert calls(r"tier\.(publish|exchange)\(", {"storage/posix_store.py", "control/checkpoints/commit.py"} | runs) == []
    assert calls(r"tier\.supplant\(", {"storage/posix_store.py"}) == []
    assert (
        calls(
            r"\bos\.(rename|replace|renames|fsync|fdatasync|link)\(|\brenameat2\(", {"storage/posix.py", "storage/libc.py"}
        )
        == []
    )
    assert calls(r"\bos\.(rmdir|truncate)\(|\brmtree\(", {"storage/directories.py"}) == []
