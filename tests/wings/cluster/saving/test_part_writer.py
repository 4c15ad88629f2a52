"""Several nodes write one checkpoint: whatever each holds, the same bytes as one node that holds everything, each written
once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast_formats import naming
from holdfast_formats.disk import manifests, packing
from holdfast_formats.errors import AlreadyCommitted, CorruptManifest, RoundAborted, StateMismatch
from holdfast_formats.naming import Place
from holdfast_formats.region import Box
from holdfast_formats.staging import blocks, declaration, part
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.plan import Receipt, WritePlan
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_formats.staging.slot_table import Blob, SlotTable
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints import commit, planner
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.writing import gathering
from holdfast_service.storage import MemoryTier, PosixStore, Tier
from holdfast_service.wings.cluster.saving import share_planner
from holdfast_service.wings.cluster.saving.part_writer import NodeShare, SlotSources, write_share
from tests.daemon.writing.test_path import DTYPES, Shards, cuts, draw_masters, files_of

STAGED = Place("r", 7, 1, 5)
CREATED = "2026-01-01T00:00:00Z"
BLOCK = 256


class Site:
    """Nodes that write the plan of one world together; `asked` counts how often a byte of a slot came from elsewhere."""

    def __init__(self, made: Shards, node_of: Sequence[int], block_bytes: int = BLOCK) -> None:
        self.plan: WritePlan = planner.plan(made.tables())
        self.slots = {rank: memoryview(bytes(data)) for rank, data in enumerate(made.data)}
        self.node_of, self.nodes = node_of, max(node_of) + 1
        self.parts = parts_of(made.tables(), node_of)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(blocks, "BLOCK_BYTES_MIN", block_bytes)
            patched.setattr(blocks, "BLOCK_BYTES", block_bytes)
            share_planner.forget()
            self.own = [share_planner.plan_share(self.parts, node) for node in range(self.nodes)]
        self.asked: Counter[SlotRange] = Counter()

    def write(self, tier: Tier, node: int, staged: Place = STAGED, by: int | None = None) -> Receipt:
        """The share of a node, which another one may write."""
        by = node if by is None else by
        own = {rank: data for rank, data in self.slots.items() if self.node_of[rank] == by}
        plan = self.plan._replace(files=self.own[node].plan.files)

        def bring(wanted: Sequence[SlotRange], into: Mapping[int, memoryview]) -> None:
            for one in wanted:
                assert one.rank not in own
                self.asked[one] += 1
                into[one.rank][one.begin : one.end] = self.slots[one.rank][one.begin : one.end]

        ranks = [rank for rank, home in enumerate(self.node_of) if home == node]
        share = NodeShare(self.own[node].shares, self.own[node].block_bytes, ranks)
        return write_share(PosixStore(tier).begin(staged), plan, SlotSources(own, bring), share, f"n{by}")

    def save(self, tier: MemoryTier) -> manifests.Manifest:
        receipts = [self.write(tier, node) for node in reversed(range(self.nodes))]
        return commit.publish_joint(PosixStore(tier), self.plan, JointlyStaged(STAGED, receipts, CREATED))


def parts_of(tables: Sequence[SlotTable], node_of: Sequence[int]) -> list[tuple[str, DecodedPart]]:
    """What each node brings of a world's tables, as the others read it."""
    found = []
    for node in range(max(node_of) + 1):
        encoded = part.encode([table for table in tables if node_of[table.rank] == node])
        read = part.decode(declaration.decode(encoded.declaration), encoded.said)
        found.append((hashlib.sha256(encoded.declaration).hexdigest(), read))
    return found


def columns(sizes: Sequence[int], world: int) -> Shards:
    made = Shards(world)
    for number, size in enumerate(sizes):
        spec = TensorSpec("model", f"t.{number}", "U8", (3, size))
        content = np.random.default_rng(number).integers(0, 256, spec.nbytes, np.uint8).tobytes()
        edges = [size * rank // world for rank in range(world + 1)]
        boxes = [[Box((0, a), (3, b - a))] for a, b in pairwise(edges)]
        made.add(spec, content, [(rank, held) for rank, held in enumerate(boxes) if held[0].volume])
    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and extents far smaller than files."""
    monkeypatch.setattr(gathering, "EXTENT_BYTES_MAX", 1024)
    monkeypatch.setattr(gathering, "WRITE_BYTES", 1024)
    monkeypatch.setattr(gathering, "CACHED_BYTES", 512)
    monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", 64)


@pytest.mark.usefixtures("small")
@given(st.data(), st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_bytes_do_not_depend_on_the_nodes(data: st.DataObject, world: int) -> None:
    """Random tensors, cut at random, on random nodes: the files of one rank that holds everything."""
    sharded, single = Shards(world), Shards(1)
    for index in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = tuple(data.draw(st.lists(st.integers(0, 12), max_size=3)))
        if dtype == "F4":
            shape = (*shape, 4)
        spec = TensorSpec("model", f"t.{index}", dtype, shape)
        content = np.random.default_rng(index).integers(0, 2, spec.nbytes, np.uint8).tobytes()
        owned: dict[int, list[Box]] = {}
        for box in data.draw(cuts(shape, dtype)):
            owned.setdefault(data.draw(st.integers(0, world - 1)), []).append(box)
        sharded.add(spec, content, list(owned.items()) or [(0, [Box((0,) * len(shape), shape)])])
        single.add(spec, content, [(0, [Box((0,) * len(shape), shape)])])
    node_of = [data.draw(st.integers(0, 2)) for _ in range(world)]
    nodes = sorted(set(node_of))
    site = Site(sharded, [nodes.index(node) for node in node_of])
    tier, reference = MemoryTier(), MemoryTier()
    made, expected = site.save(tier), single.save(reference)
    names = [file.name for file in expected.files if file.header_bytes]
    assert {name: files_of(tier)[name] for name in names} == {name: files_of(reference)[name] for name in names}
    assert verify(tier, naming.checkpoint_path("r", 7)) == made


@pytest.mark.usefixtures("small")
@given(st.data(), st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nodes_write_weights_from_masters_of_others(data: st.DataObject, world: int) -> None:
    """Masters anywhere, weights nowhere: the files of one rank that holds both, and no byte is asked for but of masters."""
    sharded, single = draw_masters(data, world)
    node_of = [data.draw(st.integers(0, 2)) for _ in range(world)]
    nodes = sorted(set(node_of))
    site = Site(sharded, [nodes.index(node) for node in node_of])
    tier, reference = MemoryTier(), MemoryTier()
    made, expected = site.save(tier), single.save(reference)
    names = [file.name for file in expected.files if file.header_bytes]
    assert {name: files_of(tier)[name] for name in names} == {name: files_of(reference)[name] for name in names}
    assert verify(tier, naming.checkpoint_path("r", 7)) == made


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("alignment", [1, 256])
def test_windows_blocks_and_extents_of_different_lengths(alignment: int) -> None:
    """Strided tensors over many blocks, and a tier that asks for whole pages: no extent crosses the edge of a block, and
    after one they begin at multiples again.
    """
    site = Site(columns([1, 700, 13, 2, 900, 5, 333, 4000, 17], 3), [0, 1, 2])
    tier = MemoryTier(alignment=alignment)
    made = site.save(tier)
    for tensor in made.tensors["model"].values():
        step = packing.tensor_extent_bytes(tensor.nbytes, site.plan.extent_bytes)
        for extent in tensor.extents:
            begin, end = tensor.start + extent.offset, tensor.start + extent.offset + extent.length
            assert begin // BLOCK == (end - 1) // BLOCK and (begin % BLOCK == 0 or extent.offset % step == 0)
    assert verify(tier, naming.checkpoint_path("r", 7)) == made


@pytest.mark.usefixtures("small")
def test_nothing_is_brought_twice_or_in_vain() -> None:
    """Rows that lie together stay on their node: what comes from elsewhere is what the balance of blocks asks for."""
    made = Shards(2)
    spec = TensorSpec("model", "w", "U8", (64, 256))
    content = np.random.default_rng(0).integers(0, 256, spec.nbytes, np.uint8).tobytes()
    made.add(spec, content, [(rank, [Box((32 * rank, 0), (32, 256))]) for rank in range(2)])
    site = Site(made, [0, 1])
    site.save(MemoryTier())
    assert all(count == 1 for count in site.asked.values())
    assert sum(one.length for one in site.asked) <= 9 * BLOCK  # the header's blocks move others by so many


@pytest.mark.usefixtures("small")
def test_assets_come_from_the_node_that_has_them() -> None:
    """config.json of rank 1, on the second node."""
    made = columns([100], 2)
    made.blobs[1].append(Blob("config.json", len(made.data[1]), 2))
    made.data[1] += b"{}"
    tier = MemoryTier()
    Site(made, [0, 1]).save(tier)
    assert files_of(tier)["config.json"] == b"{}"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unable", [0, 1, 2])
def test_who_writes_a_share_makes_no_difference(unable: int) -> None:
    """Every other node can, over what the first had begun to write: files, assets and digests are the same."""
    made = columns([500, 700, 3], 3)
    for rank, text in enumerate([b"{}", b"", b"[1]"]):
        made.blobs[rank].append(Blob(f"of-{rank}.json", len(made.data[rank]), len(text)))
        made.data[rank] += text
    site, expected = Site(made, [0, 1, 2]), MemoryTier()
    written = site.save(expected)
    for helper in {0, 1, 2} - {unable}:
        tier = MemoryTier()
        site.write(tier, unable)
        receipts = [site.write(tier, node, by=helper if node == unable else node) for node in range(3)]
        assert receipts[unable].node == f"n{helper}"
        assert commit.publish_joint(PosixStore(tier), site.plan, JointlyStaged(STAGED, receipts, CREATED)) == written
        assert files_of(tier) == files_of(expected)


@pytest.mark.usefixtures("small")
def test_who_commits_makes_no_difference() -> None:
    """A second committer of the same round finds the same bytes there, and its commit is a success; nothing is left over
    under checkpoints/ that the first did not put there.
    """
    site, tier = Site(columns([500, 700], 3), [0, 1, 2]), MemoryTier()
    store = PosixStore(tier)
    receipts = [site.write(tier, node) for node in range(3)]
    staged = JointlyStaged(STAGED, receipts, CREATED)
    assert commit.published_already(store, site.plan, staged) is None
    first = commit.publish_joint(store, site.plan, staged)
    files = files_of(tier)
    assert commit.published_already(store, site.plan, staged) == first
    assert commit.published_already(store, site.plan, staged._replace(created="2026-01-02T00:00:00Z")) is None
    assert commit.publish_joint(store, site.plan, staged._replace(receipts=receipts[::-1])) == first
    assert files_of(tier) == files
    with pytest.raises((AlreadyCommitted, RoundAborted)):
        commit.publish_joint(store, site.plan, staged._replace(created="2026-01-02T00:00:00Z"))
    assert files_of(tier) == files


@pytest.mark.usefixtures("small")
def test_a_late_committer_publishes_no_rest() -> None:
    """The checkpoint was published by another node, and removed: the small files alone do not become one."""
    site, tier = Site(columns([500, 700], 3), [0, 1, 2]), MemoryTier()
    store = PosixStore(tier)
    staged = JointlyStaged(STAGED, [site.write(tier, node) for node in range(3)], CREATED)
    commit.publish_joint(store, site.plan, staged)
    tier.remove_tree(naming.checkpoint_path("r", 7))
    with pytest.raises(RoundAborted, match="is not there"):
        commit.publish_joint(store, site.plan, staged)
    assert tier.list(naming.checkpoint_path("r", 7)) == []


@pytest.mark.usefixtures("small")
def test_without_every_share_nothing_is_published() -> None:
    """A receipt is missing, or one does not say all that its node was to write."""
    site, tier = Site(columns([500, 700], 3), [0, 1, 2]), MemoryTier()
    store = PosixStore(tier)
    receipts = [site.write(tier, node) for node in range(3)]
    less = Receipt("n1", "r", 7, 1, (), {})
    for few in (receipts[:2], [receipts[0], less, receipts[2]], []):
        with pytest.raises((StateMismatch, CorruptManifest)):
            commit.publish_joint(store, site.plan, JointlyStaged(STAGED, few, CREATED))
    assert tier.list(naming.checkpoint_path("r", 7)) == []


@pytest.mark.usefixtures("small")
def test_a_receipt_of_another_save_publishes_nothing() -> None:
    """A catalog that mixes up rounds makes no checkpoint of it: each receipt says of which save it is."""
    site, tier = Site(columns([500, 700], 3), [0, 1, 2]), MemoryTier()
    receipts = [site.write(tier, node) for node in range(3)]
    for other in ({"step": 8}, {"attempt": 2}, {"run": "another"}):
        wrong = msgspec.structs.replace(receipts[1], **other)
        with pytest.raises(StateMismatch, match="belongs to another save"):
            commit.publish_joint(tier, site.plan, JointlyStaged(STAGED, [receipts[0], wrong, receipts[2]], CREATED))
    assert tier.list(naming.checkpoint_path("r", 7)) == []
