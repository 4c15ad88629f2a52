"""Determines what a save puts into a slot: the state as it is now, its places in the slot, and the slot's table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.stage import background_safe, staging
from holdfast.stage.from_master import FromMasters
from holdfast.stage.slot_growth import Need
from holdfast.stage.staging import AveragePart, SaveIdentity, SlotLayout
from holdfast.state.assets import NO_ASSETS, ROOM_BYTES_MIN
from holdfast.state.named_entries import NamedSnapshot
from holdfast.state.train_state import Snapshot, TrainState
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging.slot_table import digests_bytes

TABLE_BYTES_A_TENSOR = 256


class SlotContents:
    """The contents of slots. Reuses the parts that did not change. Not thread-safe: guarded by its owner's lock."""

    def __init__(
        self,
        state: TrainState,
        assets: Mapping[str, bytes],
        fenced: bool,
        file_bytes_max: int,
        from_masters: FromMasters | None = None,
    ) -> None:
        """`fenced` and `file_bytes_max` are the checkpointer's options; `from_masters` selects weights to leave out."""
        self._state, self._assets, self._from_masters = state, assets, from_masters
        self._fenced, self._file_bytes_max = fenced, file_bytes_max
        self.layout = staging.NOTHING  # of the last save

    def snapshot(self, groups: Collection[str] | None = None, exclude: Sequence[str] = ()) -> Snapshot:
        """Take a snapshot of the state and its random streams, without what is excluded. Random numbers drawn by user
        objects meanwhile are put back.

        An adapter draws none, and may be saved by a thread while the training draws.
        """
        taken = self._snapshot(groups, exclude)
        return taken if self._from_masters is None else self._from_masters.apply(taken)

    def _snapshot(self, groups: Collection[str] | None, exclude: Sequence[str]) -> Snapshot:
        if any(isinstance(value, NamedSnapshot) for value in self._state.state.values()):
            return self._state.snapshot(groups, exclude)
        with self._state.random.kept():
            return self._state.snapshot(groups, exclude)

    def check_masters(self) -> None:
        """Refuse weights that the last snapshot left out and that differ from their rounded masters: see `FromMasters`."""
        if self._from_masters is not None:
            self._from_masters.check()

    def restored(self) -> None:
        if self._from_masters is not None:
            self._from_masters.restored()

    def lay_out(self, snapshot: Snapshot, assets: Mapping[str, bytes] = NO_ASSETS) -> SlotLayout:
        """Places of everything in a slot, with the save's own assets beside or instead of those of all saves.

        `StateMismatch` for a part of a tensor in a world of one.
        """
        if self._state.world == 1:
            staging.refuse_parts(snapshot.leaves[staging.common(self.layout.leaves, snapshot.leaves) :])
        judge = background_safe.Judge(self._state.state, self._fenced)
        both = {**self._assets, **assets}
        self.layout = staging.lay_out(snapshot, both, judge, self.layout, self._file_bytes_max)
        return self.layout

    def table(
        self,
        who: SaveIdentity,
        snapshot: Snapshot,
        metrics: Mapping[str, float],
        intent: Intent = NO_INTENT,
        average: AveragePart | None = None,
    ) -> bytes:
        """The table of a slot that has the layout of the last one."""
        return staging.encode_table(who, snapshot, self.layout, metrics, self._file_bytes_max, intent, average)

    def expected(self, who: SaveIdentity) -> Need:
        snapshot = self.snapshot()
        layout = self.lay_out(snapshot)
        more = background_safe.expected_growth(self._state.state)
        table_bytes = len(self.table(who, snapshot, {})) + digests_bytes(len(layout.copies))
        table_bytes += more.tensors * TABLE_BYTES_A_TENSOR
        return Need(layout.data_bytes + more.bytes, table_bytes, layout.leaves, ROOM_BYTES_MIN, expected=True)
