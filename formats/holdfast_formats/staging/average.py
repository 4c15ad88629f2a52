"""The bytes of an average: one more shared-memory segment a rank, in which the daemon keeps a moving average of a
group.

    page 0     superblock: as the staging arena's, with a magic of its own and no slots; then the bytes of a chunk
    page 1     the rank's words: state and table of the update, its number, seal word, and the last number decided
    pages 2, 3 the daemon's record, alternating: generation, length, digest, JSON (`AverageRecord`)
    page 4     the daemon's progress in a fold: the chunk in the journal, and the chunks copied, each with the fold's number
    then       update table · update · accumulator · journal               each begins at a 4 KiB boundary

Updates are numbered from 1 on, per attempt, and every rank accounts for every number, with a sealed update or none.
There are no requests: the rank takes the update's place while it is free and seals it, the daemon folds it and frees
it. So whatever process dies, the segment states how to continue. A chunk is computed into the journal, its number
recorded, copied, and recorded again: a chunk whose copy is not recorded is either unchanged, or complete in the
journal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from holdfast_formats import decoding, digest, dtypes
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import PAGE_BYTES, SegmentOwner, SlotState, page_aligned

MAGIC = b"HFAVRAGE"
VERSION = 1
GROUP = "ema"
VALUE = "average"  # the key in state.json, in the group
WIDENED = ("F32", "BF16", "F16")  # dtypes that are averaged, in F32
CHUNK_BYTES = 2**20  # of the accumulator; what is computed between two notes
Correction = Literal["bias", "none"]

_SUPERBLOCK = struct.Struct("<8sIIQQIIQ128sQ")  # magic, version, 0, data, table, rank, world, attempt, run, chunk
_RANK = struct.Struct("<IIQQQQ")  # state, 0, number, table bytes, seal word, the last number decided
_RECORD = struct.Struct("<QQQ")  # generation, length, digest
_PROGRESS = struct.Struct("<QQ")  # in the journal, copied: number of the fold and count of chunks in one word
_RANK_AT, _RECORDS_AT, _PROGRESS_AT, _TABLE_AT = PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 5 * PAGE_BYTES
_DECIDED_OFFSET = 32
_CHUNK_BITS = 24
_CHUNKS_MAX = 2**_CHUNK_BITS - 1


class AverageRule(msgspec.Struct, frozen=True):
    """The rule of an average: the group, the interval in steps, and the decay.

    `correction="bias"`: c ← c + w·(x − c) with w = (1−d)/(1−dⁿ), usable at any n. "none": w = 1−d, and c₁ = x₁.
    """

    of: str
    decay: float
    every: int
    correction: Correction = "bias"

    def weight(self, n: int) -> float:
        """The weight of the n-th update, from 1 on. The first one is copied."""
        if n <= 1:
            return 1.0
        return 1.0 - self.decay if self.correction == "none" else (1.0 - self.decay) / (1.0 - self.decay**n)


class AverageRecord(msgspec.Struct, frozen=True):
    """The contents of an accumulator and their history.

    `number` is the last update processed, `folded` the last one folded in, `seeded` the one that set the accumulator:
    from a checkpoint, or to nothing. `n` counts the updates in the average, `own` those since the seed; the other
    counts are those of the seed. `layout` is a digest of the elements' places. `history` is a digest of the seed and of
    all updates folded in since: equal histories mean equal updates (`average_history`).
    """

    number: int = 0
    folded: int = 0
    seeded: int = 0
    n: int = 0
    own: int = 0
    step: int = 0
    dropped: int = 0
    skipped: int = 0
    lost: int = 0
    layout: str = ""
    rule: AverageRule | None = None
    history: str = ""


class AverageState(msgspec.Struct, frozen=True):
    """A checkpoint's description of its average, in state.json: the rule, the number of updates and the step of the
    last one; and the missing ones: `dropped` because the previous update was not finished, `skipped` by their loss,
    `lost` with a daemon or a failed copy.
    """

    of: str
    decay: float
    every: int
    correction: Correction
    n: int
    step: int
    dropped: int = 0
    skipped: int = 0
    lost: int = 0


class AverageStretch(msgspec.Struct, frozen=True, array_like=True):
    """`count` elements at `offset` of an update and of the accumulator. `WIDENED` dtypes are averaged as F32; `U8` are
    bytes that are copied: buffers, and everything that is no float.
    """

    offset: int
    count: int
    dtype: str

    @property
    def kept_bytes(self) -> int:
        return self.count if self.dtype == "U8" else 4 * self.count

    @property
    def brought_bytes(self) -> int:
        return dtypes.nbytes(self.dtype, self.count, "update")


class AverageUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """The table of an update. One with a `seed` sets the accumulator instead, to the elements of the update, or to
    nothing if the seed's n is 0.
    """

    owner: SegmentOwner
    number: int
    step: int
    rule: AverageRule
    layout: str
    stretches: tuple[AverageStretch, ...]
    seed: AverageState | None = None


class AverageHandover(msgspec.Struct, frozen=True):
    """In the table of a save: where in the slot the daemon puts the accumulator, and which updates came before the
    save.

    A page for the daemon's note follows the region. `skipped` and `lost` count since the seed. `apart` are the group's
    boxes, counted from its first, that may differ between ranks holding the same: buffers. The daemon sets `history`
    once the accumulator is in the slot.
    """

    slot_offset: int
    nbytes: int
    after: int
    layout: str
    skipped: int = 0
    lost: int = 0
    history: str = ""
    apart: tuple[int, ...] = ()

    @property
    def note_offset(self) -> int:
        return self.slot_offset + page_aligned(self.nbytes)

    @property
    def end(self) -> int:
        return self.note_offset + PAGE_BYTES


class AverageGeometry(NamedTuple):
    """The sizes of an average's segment, in bytes: room for an update or the accumulator, its table, and a chunk."""

    data_bytes: int
    table_bytes_max: int
    chunk_bytes: int = CHUNK_BYTES

    @property
    def update_offset(self) -> int:
        return _TABLE_AT + self.table_bytes_max

    @property
    def accumulator_offset(self) -> int:
        return self.update_offset + self.data_bytes

    @property
    def journal_offset(self) -> int:
        return self.accumulator_offset + self.data_bytes

    @property
    def segment_bytes(self) -> int:
        return self.journal_offset + self.chunk_bytes


class UpdateHeader(NamedTuple):
    state: SlotState
    number: int
    table_bytes: int
    seal: int
    decided: int


class FoldProgress(NamedTuple):
    """The chunks of the fold with this number that are computed, and those that are copied; 0 for another fold's."""

    journaled: int
    copied: int


def geometry(data_bytes: int, table_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> AverageGeometry:
    """The geometry of a segment with this much room; `InvalidRequest` or `LimitExceeded` for impossible sizes."""
    if data_bytes < 0 or table_bytes < 0 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise InvalidRequest(f"an average of {data_bytes} + {table_bytes} bytes in chunks of {chunk_bytes} is not possible")
    average_geometry = AverageGeometry(page_aligned(max(data_bytes, 1)), page_aligned(max(table_bytes, 1)), chunk_bytes)
    if average_geometry.segment_bytes > arena.SEGMENT_BYTES_MAX:
        raise LimitExceeded(f"an average's segment of {average_geometry.segment_bytes} bytes is over the limit")
    return average_geometry


def write_superblock(memory: memoryview, average_geometry: AverageGeometry, owner: SegmentOwner) -> None:
    run = owner.run.encode()
    sizes = average_geometry.data_bytes, average_geometry.table_bytes_max
    _SUPERBLOCK.pack_into(
        memory, 0, MAGIC, VERSION, 0, *sizes, owner.rank, owner.world, owner.attempt, run, average_geometry.chunk_bytes
    )


def is_average(page: memoryview) -> bool:
    """Whether a segment's first page is that of an average, of whatever version."""
    return len(page) >= PAGE_BYTES and bytes(page[: len(MAGIC)]) == MAGIC


def read_superblock(page: memoryview) -> AverageGeometry:
    """The geometry that a first page states; `InvalidRequest` or `LimitExceeded` if it is not one of ours."""
    if not is_average(page):
        raise InvalidRequest(f"a segment of {len(page)} bytes is not an average")
    _, version, slots, data_bytes, table_bytes, *_, chunk_bytes = _SUPERBLOCK.unpack_from(page, 0)
    if version != VERSION or slots:
        raise InvalidRequest("shared memory does not hold an average of this version")
    measures = geometry(data_bytes, table_bytes, chunk_bytes)
    if (measures.data_bytes, measures.table_bytes_max) != (data_bytes, table_bytes):
        raise InvalidRequest(f"an average with room for {data_bytes} + {table_bytes} bytes, which are not whole pages")
    return measures


def read_owner(page: memoryview) -> SegmentOwner:
    """The rank that a segment belongs to; `InvalidRequest` for an invalid one. Read the superblock first."""
    return arena.read_owner(page)  # at the same place


def read_rank(memory: memoryview) -> UpdateHeader:
    """The rank's words; `InvalidRequest` if they are not valid."""
    state, _, number, table_bytes, seal, decided = _RANK.unpack_from(memory, _RANK_AT)
    if state not in tuple(SlotState):
        raise InvalidRequest("an average's update has no valid header")
    return UpdateHeader(SlotState(state), number, table_bytes, seal, decided)


def take(memory: memoryview, number: int) -> None:
    """Mark the update's free place as taken by the rank."""
    decided = read_rank(memory).decided
    _RANK.pack_into(memory, _RANK_AT, SlotState.LEASED, 0, number, 0, 0, decided)


def seal(memory: memoryview, average_geometry: AverageGeometry, number: int, table: bytes) -> None:
    """Mark the rank's update with this number complete: the table, then the words, then the state, then the decision."""
    if len(table) > average_geometry.table_bytes_max:
        raise LimitExceeded(f"a table of {len(table)} bytes does not fit the average's {average_geometry.table_bytes_max}")
    memory[_TABLE_AT : _TABLE_AT + len(table)] = table
    decided = read_rank(memory).decided
    _RANK.pack_into(memory, _RANK_AT, SlotState.LEASED, 0, number, len(table), digest.number(table), decided)
    struct.pack_into("<I", memory, _RANK_AT, SlotState.SEALED)
    decide(memory, number)


def free(memory: memoryview) -> None:
    struct.pack_into("<I", memory, _RANK_AT, SlotState.FREE)


def decide(memory: memoryview, number: int) -> None:
    """Record that the rank has sealed, or will never seal, updates up to this number."""
    _store(memory, _RANK_AT + _DECIDED_OFFSET, number)


def read_table(memory: memoryview, average_geometry: AverageGeometry) -> bytes:
    """The sealed update's table; `InvalidRequest` if its digest differs from the seal."""
    header = read_rank(memory)
    table = bytes(memory[_TABLE_AT : _TABLE_AT + min(header.table_bytes, average_geometry.table_bytes_max)])
    if header.state is not SlotState.SEALED or digest.number(table) != header.seal:
        raise InvalidRequest(f"update {header.number} of an average differs from the sealed one")
    return table


def read_record(memory: memoryview) -> AverageRecord:
    """The newer valid one of the two records. A new segment has none: its accumulator is empty."""
    return max(_records(memory), default=(0, AverageRecord()), key=lambda record: record[0])[1]


def write_record(memory: memoryview, record: AverageRecord) -> None:
    """Replace the older of the two records, which becomes valid with its digest."""
    known = _records(memory)
    generation = max((generation_known for generation_known, _ in known), default=0) + 1
    encoded = msgspec.json.encode(record)
    if len(encoded) > PAGE_BYTES - _RECORD.size:
        raise LimitExceeded(f"an average's record of {len(encoded)} bytes does not fit a page")
    at = _RECORDS_AT + generation % 2 * PAGE_BYTES
    _RECORD.pack_into(memory, at, 0, 0, 0)
    memory[at + _RECORD.size : at + _RECORD.size + len(encoded)] = encoded
    _RECORD.pack_into(memory, at, generation, len(encoded), _record_digest(generation, encoded))


def _records(memory: memoryview) -> list[tuple[int, AverageRecord]]:
    records = []
    for at in (_RECORDS_AT, _RECORDS_AT + PAGE_BYTES):
        generation, length, proof = _RECORD.unpack_from(memory, at)
        encoded = bytes(memory[at + _RECORD.size : at + _RECORD.size + min(length, PAGE_BYTES - _RECORD.size)])
        if generation and proof == _record_digest(generation, encoded):
            records.append((generation, _decode_record(encoded)))
    return records


def _record_digest(generation: int, encoded: bytes) -> int:
    return digest.number(generation.to_bytes(8, "little") + encoded)


def read_progress(memory: memoryview, number: int) -> FoldProgress:
    journaled, copied = _PROGRESS.unpack_from(memory, _PROGRESS_AT)
    return FoldProgress(_count_of(journaled, number), _count_of(copied, number))


def note_journaled(memory: memoryview, number: int, chunks: int) -> None:
    """Record that so many chunks are computed, the last of them in the journal."""
    _store(memory, _PROGRESS_AT, _word(number, chunks))


def note_copied(memory: memoryview, number: int, chunks: int) -> None:
    _store(memory, _PROGRESS_AT + 8, _word(number, chunks))


def _store(memory: memoryview, at: int, word: int) -> None:
    """Write 8 aligned bytes in one store, which no kill tears; `struct` writes byte by byte."""
    memory[at : at + 8].cast("Q")[0] = word


def _word(number: int, chunks: int) -> int:
    if chunks > _CHUNKS_MAX:
        raise LimitExceeded(f"a fold of more than {_CHUNKS_MAX} chunks")
    return number << _CHUNK_BITS | chunks


def _count_of(word: int, number: int) -> int:
    return word & _CHUNKS_MAX if word >> _CHUNK_BITS == number else 0


def encode_update(update: AverageUpdate) -> bytes:
    return msgspec.json.encode(update)


_decode_record = decoding.decoder(AverageRecord)
_decode_update = decoding.decoder(AverageUpdate)
_decode_state = decoding.decoder(AverageState)


def decode_update(encoded: bytes, data_bytes: int) -> AverageUpdate:
    """The table of an update, its stretches inside `data_bytes`; `InvalidRequest` if not."""
    try:
        update = _decode_update(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read the table of an average's update: {error}") from error
    end = 0
    for stretch in update.stretches:
        if stretch.dtype not in (*WIDENED, "U8"):
            raise InvalidRequest(f"an average of {stretch.dtype} is not possible")
        if stretch.offset < end or stretch.count < 0:
            raise InvalidRequest(f"a stretch at {stretch.offset} of an average overlaps the one before")
        end = stretch.offset + max(stretch.kept_bytes, stretch.brought_bytes)
    if end > data_bytes:
        raise InvalidRequest(f"an average's update of {end} bytes is longer than its room of {data_bytes}")
    return update


def decode_state(encoded: bytes | str) -> AverageState:
    """A checkpoint's description of its average; `InvalidRequest` if it is invalid."""
    try:
        return _decode_state(encoded if isinstance(encoded, bytes) else encoded.encode())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"this is not the description of an average:  {error}") from error


def encode_state(state: AverageState) -> str:
    return msgspec.json.encode(state).decode()


def state_at(record: AverageRecord, handover: AverageHandover) -> AverageState | None:
    """The description of the average that a save takes; None if it is empty."""
    rule = record.rule
    if rule is None or not record.n:
        return None
    missing = handover.after - record.seeded - record.own - handover.skipped - handover.lost
    return AverageState(
        *(rule.of, rule.decay, rule.every, rule.correction, record.n, record.step),
        dropped=record.dropped + max(missing, 0),
        skipped=record.skipped + handover.skipped,
        lost=record.lost + handover.lost,
    )


def layout_digest(described: Sequence[object]) -> str:
    """A digest of the elements' places, to compare updates, accumulators and saves."""
    return digest.digest(msgspec.json.encode(list(described)))
