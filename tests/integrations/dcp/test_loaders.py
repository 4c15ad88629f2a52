"""torchdata's loaders after a restore with other batches and workers: every row comes once, in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Checkpointer
from holdfast_formats.errors import StateMismatch

ROWS, BATCH, SEEN = 64, 4, 6

pytestmark = [  # torchdata asks for what torch has renamed, and warns of more workers than cores
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::holdfast.save_warning.SaveWarning"),
]


class Rows(Dataset[int]):
    def __init__(self, count: int = ROWS) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        return number


class Stream(IterableDataset[int]):
    """Its position is in its own state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < ROWS:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader(workers: int, batch: int = BATCH, data: Any = None) -> StatefulDataLoader[int]:
    torch.manual_seed(3)
    data = Rows() if data is None else data
    return StatefulDataLoader(data, batch_size=batch, num_workers=workers, shuffle=isinstance(data, Rows))


def saved(root: Path, begun: StatefulDataLoader[int]) -> list[int]:
    """The rows before a save in the first epoch, and those after it, of two epochs."""
    rows: list[int] = []
    with Checkpointer("r", {"loader": begun}, at=root) as checkpointer:
        for number, batch in enumerate(begun):
            if number == SEEN:
                break
            rows += batch.tolist()
            if number + 1 == SEEN:
                checkpointer.save(1, wait="durable")
    return rows


def after(root: Path, live: StatefulDataLoader[int]) -> list[int]:
    with Checkpointer("r", {"loader": live}, at=root) as checkpointer:
        assert checkpointer.restore() == 1
        return [row for batch in live for row in batch.tolist()]


@pytest.mark.parametrize(("before", "now"), [(0, 0), (0, 2), (2, 0), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("batch", [BATCH, 2 * BATCH, 3])
def test_rows_go_on(tmp_path: Path, before: int, now: int, batch: int) -> None:
    """With other workers and other batches: the rows are those that the same workers and batches would have had."""
    first = saved(tmp_path, loader(before))
    undisturbed = after(tmp_path, loader(before))
    rest = after(tmp_path, loader(now, batch))
    assert rest == undisturbed
    assert sorted(first + rest) == list(range(ROWS))


def test_other_rows_and_workers_with_a_part_of_the_data_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "rows", loader(0))
    with pytest.raises(StateMismatch, match="had 64 rows at the save, and has 80"):
        after(tmp_path / "rows", loader(0, data=Rows(80)))
    saved(tmp_path / "stream", loader(2, data=Stream()))
    with pytest.raises(StateMismatch, match="saved with num_workers=2 and has 0 now"):
        after(tmp_path / "stream", loader(0, data=Stream()))
