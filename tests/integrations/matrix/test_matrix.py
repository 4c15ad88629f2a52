"""Every system saves once, every system loads what each of them has saved, and both checkpoints hold the same tensors.

The workers run in the environments of their systems, one world after the other; this process only compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import running
from tests.integrations.environments import TOP
from tests.integrations.matrix import cells, worlds
from tests.integrations.matrix.worlds import SYSTEMS

TENSORS = 4 * 39  # of the Llama: 39 parameters, and for each two moments and a step
LOSS_TOLERANCE = 1e-5  # systems add in another order


class Matrix:
    """What was saved and loaded so far, in one root."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = root, work
        self.saved: dict[str, float] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.cells: dict[tuple[str, str], str] = {}

    def save(self, system: str) -> float:
        """Let a system save, once; its loss."""
        if system not in self.saved:
            acts = [f"save:of-{system}:{list(SYSTEMS).index(system)}"]  # no two have the same weights
            told = worlds.act(system, SYSTEMS[system].saving, self.root, self.work / f"save-{system}", acts)
            assert isinstance(told[acts[0]], float), told
            self.saved[system] = told[acts[0]]
        return self.saved[system]

    def load(self, system: str) -> dict[str, Any]:
        """Let a system load what all have saved, once; what became of it, by the system that saved."""
        for other in SYSTEMS:
            self.save(other)
        assert len(set(self.saved.values())) == len(SYSTEMS), self.saved
        if system not in self.loaded:
            acts = {other: f"load:of-{other}:{other}:{other}-by-{system}" for other in SYSTEMS}
            told = worlds.act(system, SYSTEMS[system].loading, self.root, self.work / f"load-{system}", list(acts.values()))
            self.loaded[system] = {other: told[act] for other, act in acts.items()}
        return self.loaded[system]

    def table(self) -> str:
        """The cells, as a table of a document."""
        head = ["saved by \\ loaded by", *(f"{one.title} ×{one.loading}" for one in SYSTEMS.values())]
        lines = [head, ["---"] * len(head)]
        for saved, about in SYSTEMS.items():
            found = (self.cells.get((saved, loaded), "not run") for loaded in SYSTEMS)
            lines.append([f"{about.title} ×{about.saving}", *found])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Matrix]:
    work = tmp_path_factory.mktemp("matrix")
    with running(work / "root") as daemon:
        made = Matrix(daemon.root, work)
        yield made
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{made.table()}\n")


@pytest.mark.parametrize("system", SYSTEMS)
def test_all_save_under_the_same_names(matrix: Matrix, system: str) -> None:
    """So that a difference of names is found here, and not as many differences of cells."""
    matrix.save("one")
    matrix.save(system)
    names = cells.of_holdfast(matrix.root, f"of-{system}").keys()
    assert names == cells.of_holdfast(matrix.root, "of-one").keys() and len(names) == TENSORS


@pytest.mark.parametrize(("loaded", "saved"), [(loaded, saved) for loaded in SYSTEMS for saved in SYSTEMS])
def test_what_one_saves_the_other_loads(matrix: Matrix, loaded: str, saved: str) -> None:
    """Whole tensors are bit-equal, and the model has the same loss: so they are also where they belong."""
    matrix.cells[saved, loaded] = "FAILED"
    loss = matrix.load(loaded)[saved]
    assert isinstance(loss, float), loss
    found = cells.compare(matrix.root, f"of-{saved}", f"{saved}-by-{loaded}")
    assert not found.wrong, found.wrong
    assert found.tensors == TENSORS
    assert loss == pytest.approx(matrix.save(saved), abs=LOSS_TOLERANCE)
    matrix.cells[saved, loaded] = str(found.tensors)


@pytest.mark.parametrize("page", ["matrix.md", "matrix.zh-CN.md"])
def test_the_page_says_what_was_run(matrix: Matrix, page: str) -> None:
    """Comes last: the table of the page is the one of this run."""
    if len(matrix.cells) < len(SYSTEMS) ** 2:
        pytest.skip("not all cells were run")
    told = _numbers((TOP / "docs" / "integrations" / page).read_text())
    assert told == _numbers(matrix.table()) and len(told) == len(SYSTEMS)


def _numbers(text: str) -> list[list[str]]:
    """The cells of the rows of a table of this matrix, without titles."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[1:] for row in rows if len(row) == len(SYSTEMS) + 1 and row[1].isdecimal()]
