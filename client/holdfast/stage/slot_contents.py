"""Determines what a save puts into a slot: the state as it is now, its places in the slot, and the slot's table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from holdfast.stage import background_safe, staging
from holdfast.stage.averaging import Averaging, of_save
from holdfast.stage.from_master import FromMasters
from holdfast.stage.lineage_origin import TrainingOrigin
from holdfast.stage.replica_claims import Claims, Statement
from holdfast.stage.save_request import SaveRequest
from holdfast.stage.slot_growth import Need
from holdfast.stage.staging import AveragePart, SaveIdentity, SlotLayout
from holdfast.state.assets import NO_ASSETS, ROOM_BYTES_MIN, room_to_grow
from holdfast.state.named_entries import NamedSnapshot
from holdfast.state.train_state import Snapshot, TrainState
from holdfast.threads.latch import Latch
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging.average import GROUP as EMA
from holdfast_formats.staging.slot_table import digests_bytes

TABLE_BYTES_A_TENSOR = 256
NO_AVERAGE = "saved without the group ema: no update of the average has been taken yet"


class SlotPart(NamedTuple):
    """What one save puts into its slot, the room that it needs, and its origin. `notes` name what it lacks."""

    layout: SlotLayout
    table: bytes
    says: Statement | None
    average: AveragePart | None
    after: Latch | None  # see `Sealable`
    need: Need
    intent: Intent
    notes: tuple[str, ...]


class SlotContents:
    """The contents of slots. Reuses the parts that did not change. Not thread-safe: guarded by its owner's lock."""

    def __init__(
        self,
        state: TrainState,
        assets: Mapping[str, bytes],
        fenced: bool,
        file_bytes_max: int,
        from_masters: FromMasters | None,
        averaging: Averaging | None,
    ) -> None:
        """`fenced` and `file_bytes_max` are the checkpointer's options; `from_masters` selects weights to leave out;
        `averaging` adds the group `ema`.
        """
        self._state, self._assets, self._from_masters, self._averaging = state, assets, from_masters, averaging
        self._fenced, self._file_bytes_max = fenced, file_bytes_max
        self._claims = Claims(state.state, state.world, spares=averaging is None)
        self._spared = 0  # of the last layout
        self.origin = TrainingOrigin()
        self.layout = staging.NOTHING  # of the last save

    def groups(self) -> tuple[str, ...]:
        """The groups that a save has now."""
        groups = self._state.groups()
        return groups if self._averaging is None else of_save(groups)

    def lay_out(self, asked: SaveRequest) -> Snapshot:
        """Take a snapshot of the state and its random streams, without what is excluded, and find its places in a slot.
        Random numbers drawn by user objects meanwhile are put back.

        An adapter draws none, and may be saved by a thread while the training draws.

        `StateMismatch` for a part of a tensor in a world of one.
        """
        groups = asked.groups
        if self._averaging is not None:
            groups = None if groups is None else set(groups) - {EMA}
            self._averaging.refuse_own()
        snapshot = self._snapshot(groups, asked.exclude)
        self._lay_out(snapshot, asked.assets)
        return snapshot

    def part(self, who: SaveIdentity, asked: SaveRequest, snapshot: Snapshot) -> SlotPart:
        """What this save puts into its slot: the snapshot that was laid out last. The ticket gets its groups."""
        layout, ticket = self.layout, asked.ticket
        average, after, average_bytes, notes = None, None, 0, list[str]()
        if self._averaging is not None:
            after = self._averaging.decided
            if asked.groups is None or EMA in asked.groups:
                average = self._averaging.part(layout.data_bytes)
                notes += [NO_AVERAGE] * (average is None)
            average_bytes = self._averaging.beside_bytes()
        if average is not None:
            snapshot = snapshot._replace(groups=of_save(snapshot.groups))
        ticket.groups = snapshot.groups
        intent = self.origin.intent(asked.existing, snapshot.groups)
        table = staging.encode_table(who, snapshot, layout, asked.metrics, self._file_bytes_max, intent, average)
        says = self._claims.of(layout, ticket)
        table_bytes = len(table) + (says.table_bytes if says is not None else 0)
        table_bytes += digests_bytes(average.boxes) if average is not None and says is not None else 0
        size = layout.data_bytes if average is None else average.handover.end
        spared = self._spared if asked.groups is None or set(asked.groups) >= set(self.groups()) else 0
        spare = room_to_grow(asked.assets)
        need = Need(size, table_bytes, layout.leaves, spare, average_bytes=average_bytes, spared=spared)
        return SlotPart(layout, table, says, average, after, need, intent, tuple(notes))

    def expected(self, who: SaveIdentity) -> Need:
        """The room that the first save will need."""
        snapshot = self._snapshot(None, ())
        layout = self._lay_out(snapshot, NO_ASSETS)
        more = background_safe.expected_growth(self._state.state)
        table = staging.encode_table(who, snapshot, layout, {}, self._file_bytes_max, NO_INTENT, None)
        table_bytes = len(table) + digests_bytes(len(layout.copies)) + more.tensors * TABLE_BYTES_A_TENSOR
        need = Need(layout.data_bytes + more.bytes, table_bytes, layout.leaves, ROOM_BYTES_MIN, expected=True)
        if self._averaging is None:
            return need
        data_bytes = need.data_bytes + self._averaging.expected_bytes()
        return need._replace(data_bytes=data_bytes, average_bytes=self._averaging.beside_bytes())

    def check_masters(self) -> None:
        """Refuse weights that the last snapshot left out and that differ from their rounded masters: see `FromMasters`."""
        if self._from_masters is not None:
            self._from_masters.check()

    def restored(self) -> None:
        """The state is another one: compare weights and masters again."""
        if self._from_masters is not None:
            self._from_masters.restored()

    def _snapshot(self, groups: Collection[str] | None, exclude: Sequence[str]) -> Snapshot:
        if any(isinstance(value, NamedSnapshot) for value in self._state.state.values()):
            taken = self._state.snapshot(groups, exclude)
        else:
            with self._state.random.kept():
                taken = self._state.snapshot(groups, exclude)
        return taken if self._from_masters is None else self._from_masters.apply(taken)

    def _lay_out(self, snapshot: Snapshot, assets: Mapping[str, bytes]) -> SlotLayout:
        """Places of everything in a slot, with the save's own assets beside or instead of those of all saves."""
        if self._state.world == 1:
            staging.refuse_parts(snapshot.leaves[staging.common(self.layout.leaves, snapshot.leaves) :])
        judge = background_safe.Judge(self._state.state, self._fenced)
        both, spared = {**self._assets, **assets}, self._claims.look()
        before = self.layout if spared == self._spared else staging.NOTHING
        self._spared = spared
        self.layout = staging.lay_out(snapshot, both, judge, before, self._file_bytes_max, self._claims.is_spared)
        return self.layout
