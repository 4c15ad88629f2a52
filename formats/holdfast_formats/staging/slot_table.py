"""A slot's table: what one rank put into its slot for one save. It is in the slot itself, after the header.

So a slot describes itself: a process that finds it sealed, with the right digest of the table, can save it without its
rank.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

import msgspec

from holdfast_formats import decoding, metric_values, naming
from holdfast_formats.disk.manifests import check_metrics
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.lineage import Existing, Intent
from holdfast_formats.staging import replica_claims
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_formats.staging.average import AverageHandover
from holdfast_formats.tensors import StagedFragment

TABLE_BYTES_MAX = 512 * 2**20
ASSET_BYTES_MAX = 256 * 2**20


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """A small file (an asset such as config.json) whose bytes are in the slot."""

    name: str
    slot_offset: int
    length: int


class SlotTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's part of one save.

    `values` holds JSON documents as text, by group and key. `groups` names what is saved, including groups without a
    tensor. `unstaged` are parts that this rank holds, and whose bytes another rank of this node staged: in `fragments`
    they have no boxes. `digests` are this rank's claims about the bytes of its boxes, with those of `unstaged` last, empty
    in a world of one. `average` is the place of the group `ema`, whose bytes the daemon adds after the seal; its fragments
    are the last, and nothing is unstaged then.
    """

    run: str
    step: int
    attempt: int
    rank: int
    world: int
    groups: tuple[str, ...]
    fragments: tuple[StagedFragment, ...]
    values: dict[str, dict[str, str]]
    aliases: dict[str, dict[str, str]]
    blobs: tuple[Blob, ...] = ()
    metrics: dict[str, float] = {}
    nonfinite_metrics: dict[str, metric_values.Word] = {}
    mesh: dict[str, int] = {}
    file_bytes_max: int = 0
    digests: bytes = b""
    restored: int | None = None
    turn: int = 0
    existing: Existing = "refuse"
    again: int = 0
    average: AverageHandover | None = None
    unstaged: tuple[StagedFragment, ...] = ()

    @property
    def all_metrics(self) -> dict[str, float]:
        return metric_values.joined(self.metrics, self.nonfinite_metrics)

    @property
    def owner(self) -> SegmentOwner:
        return SegmentOwner(self.run, self.rank, self.world, self.attempt)

    @property
    def intent(self) -> Intent:
        return Intent(self.restored, self.turn, self.existing, self.groups, self.again)


def without(table: SlotTable, group: str, boxes: int | None = None) -> SlotTable:
    """The table without the group, whose fragments are the last. `boxes`: the number of all other boxes, if the
    fragments are not in this table.
    """
    kept = tuple(fragment for fragment in table.fragments if fragment.spec.group != group)
    if boxes is None:
        boxes = sum(len(fragment.boxes) for fragment in kept)
    return msgspec.structs.replace(
        table,
        groups=tuple(held for held in table.groups if held != group),
        fragments=kept,
        values={held: values for held, values in table.values.items() if held != group},
        aliases={held: aliases for held, aliases in table.aliases.items() if held != group},
        digests=table.digests[: boxes * replica_claims.ROW_BYTES],
    )


class _Encoded(SlotTable, frozen=True):
    """The same table with already encoded fragments."""

    fragments: msgspec.Raw  # type: ignore[assignment]


def encode_fragment(fragment: StagedFragment) -> bytes:
    """Encode one fragment as in a table; `InvalidRequest` for values that JSON cannot hold."""
    return _json(fragment)


def encode(table: SlotTable, fragments: Sequence[bytes] | None = None) -> bytes:
    """The table's bytes; `LimitExceeded` if they do not fit a slot, `InvalidRequest` for values that JSON cannot hold.

    `fragments` replace the table's own if already encoded: most are the same from save to save.
    """
    check_metrics(table.metrics, table.nonfinite_metrics)
    count = len(table.fragments)
    if fragments is not None:
        fields = {field: getattr(table, field) for field in table.__struct_fields__}
        count = len(fragments)
        table = _Encoded(**{**fields, "fragments": msgspec.Raw(b"[" + b",".join(fragments) + b"]")})
    encoded = _json(table)
    if len(encoded) > TABLE_BYTES_MAX:
        raise LimitExceeded(f"the state's table of {count} fragments takes {len(encoded)} bytes, over {TABLE_BYTES_MAX}")
    return encoded


def with_digests(encoded: bytes, digests: bytes) -> bytes:
    """Add digests to an encoded table: they are known only after the copy."""
    return encoded[:-1] + b',"digests":"' + b64encode(digests) + b'"}' if digests else encoded


def digests_bytes(boxes: int) -> int:
    return 4 * -(-boxes * replica_claims.ROW_BYTES // 3) + 16


def _json(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the state holds a name or value that is not valid Unicode: {error}") from error


_decode = decoding.decoder(SlotTable)


def decode(encoded: bytes | memoryview, data_bytes: int) -> SlotTable:
    """Decode the table, after checking that every fragment and blob is inside `data_bytes`; `InvalidRequest` if not."""
    try:
        table = _decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read the slot's table: {error}") from error
    _check(table, data_bytes)
    return table


def _check(table: SlotTable, data_bytes: int) -> None:
    naming.check_run(table.run)
    naming.check_step(table.step)
    if not 0 <= table.rank < table.world:
        raise InvalidRequest(f"rank {table.rank} is not valid in a world of {table.world}")
    groups = {naming.check_group(group) for group in table.groups}
    if table.unstaged and table.average is not None:
        raise InvalidRequest("a table with an average leaves parts to another rank")
    for fragment in (*table.fragments, *table.unstaged):
        fragment.check()
        if fragment.spec.group not in groups:
            raise InvalidRequest(f"tensor {fragment.spec.name!r} is in group {fragment.spec.group!r}, which is not saved")
        if fragment.rounded_from and fragment.rounded_from not in groups:
            raise InvalidRequest(
                f"tensor {fragment.spec.name!r} is rounded from {fragment.rounded_from!r}, which is not saved"
            )
    for fragment in table.fragments:
        _check_span(fragment.spec.name, fragment.slot_offset, fragment.nbytes, data_bytes)
    boxes = sum(len(fragment.boxes) for fragment in (*table.fragments, *table.unstaged))
    if len(table.digests) not in (0, boxes * replica_claims.ROW_BYTES):
        raise InvalidRequest(f"{len(table.digests)} bytes of digests are not those of {boxes} boxes")
    for blob in table.blobs:
        naming.check_asset(blob.name)
        _check_span(blob.name, blob.slot_offset, blob.length, data_bytes)
    unknown = (set(table.values) | set(table.aliases)) - groups
    if unknown:
        raise InvalidRequest(f"values or aliases for groups that are not saved: {sorted(unknown)}")


def _check_span(name: str, offset: int, length: int, data_bytes: int) -> None:
    if offset < 0 or length < 0 or offset + length > data_bytes:
        raise InvalidRequest(f"{name!r} at {offset}+{length} lies outside the slot's {data_bytes} bytes")
