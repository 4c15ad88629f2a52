"""What saves of a training state put into slots: the state as it is now, where it stands there, and the slot's table."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.stage import background_safe, staging
from holdfast.stage.growth import Need
from holdfast.stage.staging import SaveIdentity, SlotLayout
from holdfast.state.train_state import Snapshot, TrainState
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging.slot_table import digests_bytes

TABLE_BYTES_A_TENSOR = 256


class SlotContents:
    """Not safe for threads: its owner's lock guards it. What is as it was at the last layout is not looked at again."""

    def __init__(self, state: TrainState, assets: Mapping[str, bytes], fenced: bool, file_bytes_max: int) -> None:
        """Nothing is looked at yet; `fenced` and `file_bytes_max` are the checkpointer's options."""
        self._state, self._assets = state, assets
        self._fenced, self._file_bytes_max = fenced, file_bytes_max
        self.layout = staging.NOTHING  # the last one

    def snapshot(self, groups: Collection[str] | None = None) -> Snapshot:
        """The state, with the random streams of this moment: what the user's objects draw when asked is put back."""
        with self._state.random.kept():
            return self._state.snapshot(groups)

    def lay_out(self, snapshot: Snapshot) -> SlotLayout:
        judge = background_safe.Judge(self._state.state, self._fenced)
        self.layout = staging.lay_out(snapshot, self._assets, judge, self.layout, self._file_bytes_max)
        return self.layout

    def table(
        self, who: SaveIdentity, snapshot: Snapshot, metrics: Mapping[str, float], intent: Intent = NO_INTENT
    ) -> bytes:
        """The table of a slot that is laid out as the last one was."""
        return staging.encode_table(who, snapshot, self.layout, metrics, self._file_bytes_max, intent)

    def expected(self, who: SaveIdentity) -> Need:
        """What the next saves will need, with what an optimizer will add at its first step."""
        snapshot = self.snapshot()
        layout = self.lay_out(snapshot)
        more = background_safe.expected_growth(self._state.state)
        table_bytes = len(self.table(who, snapshot, {})) + digests_bytes(len(layout.copies))
        return Need(layout.data_bytes + more.bytes, table_bytes + more.tensors * TABLE_BYTES_A_TENSOR, layout.leaves)
