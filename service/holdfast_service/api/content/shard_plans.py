"""Plans of shards: what a rank of a layout holds of a checkpoint, computed once and cached for a while."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from holdfast_formats import programs
from holdfast_formats.disk import read_planner, verification
from holdfast_formats.disk.coded import IN_NO_FILE
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.read_planner import ReadPlan, WantedBox
from holdfast_formats.errors import CorruptManifest, NoSuchResource, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.layout import language, rank_tensors, shard_file
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.rank_tensors import HeldTensors, LayoutHoldings
from holdfast_formats.layout.shard_file import PlacedTensor
from holdfast_formats.mapping.coded_tensors import tensors_of
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.programs.remade import remade_holdings
from holdfast_formats.region import Box
from holdfast_formats.rest import bodies
from holdfast_service.api.content.extent_cache import CachedCheckpoint
from holdfast_service.api.content.open_checkpoints import Contents, decode_cursor, encode_cursor
from holdfast_service.api.content.shard_streams import Recipe

PLANNED_MAX = 32  # shards that are kept planned, as long as
PARTS_MAX = 200_000  # they have no more parts together, of about 500 bytes each
HOLDINGS_MAX = 4  # layouts that are kept worked out, until they have given shards of as many parts
KEPT_BYTES_MAX = 2**24  # of verified extents, of a shard that is decoded
CONFIG = "config.json"
CONFIG_BYTES_MAX = 2**20
NOTES_MAX = 100
EXTENTS_MAX = 20_000  # of one page, unless a single tensor has more


class ShardKey(NamedTuple):
    """Identifies a shard: the layout as spelled, the rank, the group of tensors, and a shipped program's name."""

    layout: str
    rank: int
    group: str
    program: str = ""


class DecodedGroup:
    """Decodes boxes of a compact checkpoint's coded tensors in a group. Thread-safe."""

    def __init__(self, tier: Files, contents: Contents, group: str) -> None:
        self._tier, self._contents, self._group = tier, contents, group

    def __call__(self, name: str, box: Box) -> NDArray[Any]:
        """The values, from verified bytes; raises `Damaged`."""
        files, tensors = self._opened
        return fetched(files, tensors[TensorKey(self._group, name)], box)

    @cached_property
    def _opened(self) -> tuple[CommittedFiles, Mapping[TensorKey, ForeignTensor]]:
        contents = self._contents
        files = CommittedFiles(self._tier, contents.manifest, contents.directory, KEPT_BYTES_MAX)
        return files, tensors_of(contents.manifest)


class PlannedShard:
    """One rank's shard of one checkpoint: its file, its validator, and its stored bytes."""

    def __init__(self, tier: Files, contents: Contents, asked: ShardKey, held: HeldTensors) -> None:
        """`asked` has the layout's canonical text. Raises `StateMismatch` for what no file can hold."""
        manifest = contents.contents
        entries = manifest.tensors[asked.group]
        shapes = {name: entry.shape for name, entry in entries.items()}
        metadata = shard_file.describe(manifest.run, manifest.step, asked.layout, asked.rank, asked.group, asked.program)
        file = shard_file.lay_out(held.tensors, shapes, metadata)
        # The parts count too: the same header could hold other bytes where the rules for a model have changed.
        made_of = msgspec.msgpack.encode([contents.sha256, file.header, [local.parts for local in held.tensors]])
        self.etag = f'"{hashlib.sha256(made_of).hexdigest()[:32]}"'
        source = CachedCheckpoint(contents.directory, contents.sha256)
        self.recipe = Recipe(file, source, asked.group, entries, DecodedGroup(tier, contents, asked.group))
        self.parts = sum(len(local.parts) for local in held.tensors) + len(held.tensors)
        self._contents = contents
        self._asked = asked
        self._notes = held.notes

    def refuse_plan(self) -> None:
        """`StateMismatch` for coded tensors, whose values are not in the stored files."""
        named = {part.tensor for placed in self.recipe.file.tensors for part in placed.local.parts}
        coded = sorted(name for name in named if self.recipe.entries[name].file == IN_NO_FILE)
        if coded:
            raise StateMismatch(
                f"tensor {coded[0]!r} is compacted, so no plan can locate its values",
                hint="download the shard itself, which has the values",
                tensor=coded[0],
            )

    @cached_property
    def _totals(self) -> tuple[int, int]:
        plan = self._plan(self.recipe.file.tensors)
        return plan.needed, plan.read

    def page(self, cursor: str | None, limit: int) -> bodies.ShardPlan:
        """The plan of the tensors after `cursor`: `limit` of them, or fewer if they have very many extents.

        Raises what `refuse_plan` raises.
        """
        self.refuse_plan()
        placed = self.recipe.file.tensors
        first = self._position(cursor)
        last, extents = first, 0
        while last < min(first + limit, len(placed)):
            named = {part.tensor for part in placed[last].local.parts}
            extents += sum(len(self.recipe.entries[name].extents) for name in named)
            if extents > EXTENTS_MAX and last > first:
                break
            last += 1
        shown = placed[first:last]
        needed, read = self._totals
        manifest = self._contents.manifest
        return bodies.ShardPlan(
            run=manifest.run,
            step=manifest.step,
            manifest_sha256=self._contents.sha256,
            group=self._asked.group,
            layout=self._asked.layout,
            rank=self._asked.rank,
            program=self._asked.program or None,
            etag=self.etag,
            tensors=len(placed),
            bytes=self.recipe.file.bytes,
            header_bytes=len(self.recipe.file.header),
            needed=needed,
            read=read,
            ratio=round(read / needed, 4) if needed else 1.0,
            notes=_told(self._notes),
            items=[_item(one) for one in shown],
            sources={name: self._stored(name) for one in shown for name in (part.tensor for part in one.local.parts)},
            reads=_reads(self._plan(shown)),
            next=encode_cursor(str(last)) if last < len(placed) else None,
        )

    def _position(self, cursor: str | None) -> int:
        if cursor is None:
            return 0
        at = decode_cursor(cursor, 1)[0]
        return int(at) if at.isascii() and at.isdigit() and len(at) < 12 else len(self.recipe.file.tensors)

    def _plan(self, placed: tuple[PlacedTensor, ...]) -> ReadPlan:
        group = self._asked.group
        wanted = (WantedBox(group, part.tensor, part.box) for one in placed for part in one.local.parts)
        return read_planner.plan(self._contents.manifest, wanted)

    def _stored(self, name: str) -> bodies.StoredTensor:
        entry = self.recipe.entries[name]
        return bodies.StoredTensor(dtype=entry.dtype, shape=list(entry.shape), file=entry.file, start=entry.start)


class PlannedShards:
    """The planned shards, newest use last. One is planned at a time, because planning is bound by the CPU."""

    def __init__(self, tier: Files) -> None:
        self._tier = tier
        self._planning = threading.Lock()
        self._holdings: OrderedDict[tuple[str, ShardKey], LayoutHoldings] = OrderedDict()
        self._given = 0  # parts that came out of the holdings, which keep what ranks have in common
        self._shards: OrderedDict[tuple[str, ShardKey], PlannedShard] = OrderedDict()

    def find(self, contents: Contents, asked: ShardKey) -> PlannedShard:
        """The shard; `NoSuchResource` for an unknown group, `InvalidRequest` or `StateMismatch` for an invalid layout. All
        spellings of a layout share one.
        """
        layout = language.parse(asked.layout)
        asked = asked._replace(layout=language.text(layout))
        key = (contents.sha256, asked)
        with self._planning:
            if key not in self._shards:
                shard = PlannedShard(self._tier, contents, asked, self._holding(contents, asked).of(asked.rank))
                self._keep(key[0], key[1], shard)
                return shard
            self._shards.move_to_end(key)
            return self._shards[key]

    def _keep(self, checkpoint: str, asked: ShardKey, shard: PlannedShard) -> None:
        self._shards[checkpoint, asked] = shard
        parts = sum(one.parts for one in self._shards.values())
        while len(self._shards) > 1 and (len(self._shards) > PLANNED_MAX or parts > PARTS_MAX):
            parts -= self._shards.popitem(last=False)[1].parts
        self._given += shard.parts
        if self._given > PARTS_MAX:
            self._holdings.clear()
            self._given = 0

    def _holding(self, contents: Contents, asked: ShardKey) -> LayoutHoldings:
        key = (contents.sha256, asked._replace(rank=0))
        if key not in self._holdings:
            layout, config = language.parse(asked.layout), self._config(contents)
            self._holdings[key] = _holdings(contents.contents, asked, layout, config)
            if len(self._holdings) > HOLDINGS_MAX:
                self._holdings.popitem(last=False)
        self._holdings.move_to_end(key)
        return self._holdings[key]

    def _config(self, contents: Contents) -> Mapping[str, Any] | None:
        """The checkpoint's config.json, verified; None without one. `StateMismatch` if it is no JSON object."""
        entry = contents.manifest.file(CONFIG)
        if entry is None or entry.header_bytes or entry.bytes > CONFIG_BYTES_MAX:
            return None
        try:
            encoded = self._tier.read(f"{contents.directory}/{CONFIG}", 0, entry.bytes)
        except NoSuchResource as error:
            raise CorruptManifest(f"{CONFIG} is missing", file=CONFIG) from error
        verification.check(contents.pieces[CONFIG][0], encoded)
        try:
            config = json.loads(encoded)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise StateMismatch(
                f"{CONFIG} of this checkpoint is not a JSON object", hint="choose the rules: rules=llama, or rules=none"
            )
        return config


def _holdings(manifest: Manifest, asked: ShardKey, layout: Layout, config: Mapping[str, Any] | None) -> LayoutHoldings:
    if not asked.program:
        return rank_tensors.of_manifest(manifest, asked.group, layout, config)
    return remade_holdings(manifest, asked.group, layout, config, None, programs.load(asked.program))


def _told(notes: tuple[str, ...]) -> list[str]:
    more = len(notes) - NOTES_MAX
    return [*notes[:NOTES_MAX], *([f"and {more} more"] if more > 0 else [])]


def _item(placed: PlacedTensor) -> bodies.ShardTensor:
    local = placed.local
    return bodies.ShardTensor(
        name=local.name,
        dtype=local.dtype,
        shape=list(local.shape),
        start=placed.start,
        bytes=placed.stop - placed.start,
        padding=local.padding,
        parts=[
            bodies.ShardPart(
                tensor=part.tensor,
                offset=list(part.box.offset),
                shape=list(part.box.shape),
                start=part.start,
                strides=list(part.strides),
            )
            for part in local.parts
        ],
    )


def _reads(plan: ReadPlan) -> list[bodies.ShardRead]:
    return [
        bodies.ShardRead(
            file=read.file,
            start=read.start,
            stop=read.stop,
            extents=[
                bodies.ShardExtent(tensor=str(piece.tensor), start=piece.start, length=piece.length, digest=piece.digest)
                for piece in read.pieces
            ],
        )
        for read in plan.reads
    ]
