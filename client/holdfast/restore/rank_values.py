"""Remap per-rank values (RNG, data loader) when the world size or layout changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.left_out import LeftOutNote
from holdfast.state import rng
from holdfast.state.state_tensors import GROUP as OPTIM
from holdfast.tensors import optimizer_documents
from holdfast.tensors.device_meshes import KnownMesh
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.layout import successors
from holdfast_formats.layout.mesh import Mesh
from holdfast_formats.layout.successors import SavedRankChoice
from holdfast_formats.staging import replica_claims

_DRAWS = (
    "Its random streams are mixed with its own number, so ranks of one tensor-parallel group may draw different dropout: "
    "call the mesh's dimensions tp, dp, dp_replicate, dp_shard, cp and pp, or pass layout=ParallelLayout('tp=…')"
)
_OWN_ACCOUNT = f"{rng.GROUP}/{rng.KEY}"  # random streams say themselves what became of them


class RankState(NamedTuple):
    """The JSON values that this rank restores, the rank whose random states it continues, and notes.

    `position` and `place` are the saved ranks whose per-rank tensors it takes: of the group `extra`, and of all other
    groups.
    """

    values: state_json.Values
    stream: SavedRankChoice | None
    notes: tuple[str, ...]
    position: int = 0
    place: int = 0

    def own(self, manifest: Manifest, group: str, name: str) -> tuple[str, str]:
        """The group and name under which this rank's tensor is stored, if ranks had different tensors of one name."""
        apart = replica_claims.apart(self.position if group == replica_claims.HOME else self.place, group, name)
        return (replica_claims.HOME, apart) if apart in manifest.tensors.get(replica_claims.HOME, {}) else (group, name)


def state_of_rank(manifest: Manifest, encoded: bytes, rank: int, stated: Mesh | None, derived: KnownMesh) -> RankState:
    """The part of `state.json` for `rank`. The mesh of its launch is `stated` by a layout or a framework, or `derived` from
    the state's tensors.

    Optimizer documents of all ranks are merged, because each rank knew only the parameters of its own stage.
    """
    both = _meshes(manifest, stated, derived)
    if both is None:
        held = state_json.for_rank(encoded, rank)
        notes = [f"{name}: taken from another rank of the saved world" for name in _told(held.remapped)]
        unclear = derived.unclear
        if derived.mesh is not None and not _is_counted(derived.mesh):
            unclear = f"the checkpoint's mesh has the dimensions {tuple(manifest.mesh)}, which do not number its ranks"
        if stated is None and unclear and rank >= manifest.world:
            text = f"rank {rank} is new, and it is not known which ranks share tensors: {unclear}"
            notes.append(LeftOutNote(f"{text}. {_DRAWS}"))
        writer = rank % manifest.world
        return RankState(_merged(encoded, held), None, tuple(notes), writer, writer)
    saved, now = both
    position, stream = successors.position(saved, now, rank), successors.stream(saved, now, rank)

    def heir(group: str, key: str) -> int:
        return position.rank if group == rng.GROUP and key != rng.KEY else stream.rank

    held = state_json.for_rank(encoded, rank, heir)
    differing = list(_told(held.ranked))
    positions = [name for name in differing if name.startswith(f"{rng.GROUP}/")]
    notes = _of_positions(positions, position, (saved, now), rank)
    if not stream.exact:
        own = [name for name in differing if name not in positions]
        notes += [
            f"{name}: rank {rank} has no counterpart in the saved world; taken from rank {stream.rank}" for name in own
        ]
    notes += [f"{name}: its counterpart saved no value; taken from another rank" for name in _told(held.remapped)]
    return RankState(_merged(encoded, held), stream, tuple(notes), position.rank, stream.rank)


def _meshes(manifest: Manifest, stated: Mesh | None, derived: KnownMesh) -> tuple[Mesh, Mesh] | None:
    """The meshes of the saved ranks and of the present ones, if both are known. Ranks that are only counted need none."""
    saved = successors.read(manifest.mesh)
    if stated is not None:
        return None if saved is None or saved.world != manifest.world else (saved, stated)
    if saved is None:
        saved = successors.of_dimensions(manifest.mesh, manifest.world)
    if saved is None and list(manifest.mesh.values()) in ([], [manifest.world]):  # as FSDP2's own, without a name
        saved = successors.of_dimensions({"dp": manifest.world}, manifest.world)
    now = derived.mesh
    if saved is None or now is None or saved.world != manifest.world:
        return None
    return None if _is_counted(saved) and _is_counted(now) else (saved, now)


def _is_counted(mesh: Mesh) -> bool:
    """Whether the ranks are numbered by their rows: no two share any."""
    return mesh.world == successors.indices(mesh)


def _of_positions(names: Sequence[str], heir: SavedRankChoice, meshes: tuple[Mesh, Mesh], rank: int) -> list[str]:
    saved, now = meshes
    index, count = successors.index(now, now.coordinate(rank)), successors.indices(saved)
    notes = []
    if not heir.exact:
        text = (
            f"data-parallel index {index} is new ({count} were saved): it continues from rank {heir.rank}'s "
            "position, like other ranks"
        )
        notes += [f"{name}: {text}" for name in names]
    left = successors.left(saved, now)
    if left:
        text = (
            f"data-parallel indices {left.start} to {left.stop - 1} of {count} were saved but are not continued: "
            f"there are only {left.start} now"
        )
        notes += [f"{name}: {text}" for name in names]
    return notes


def _told(names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if not name.startswith(f"{OPTIM}/") and name != _OWN_ACCOUNT)


def _merged(encoded: bytes, held: state_json.RankValues) -> state_json.Values:
    if not any(name.startswith(f"{OPTIM}/") for name in held.ranked):
        return held.values
    written = state_json.by_rank(encoded, OPTIM)
    merged = {
        key: optimizer_documents.merged(list(dict.fromkeys([own, *written.get(key, {}).values()])))
        for key, own in held.values[OPTIM].items()
    }
    return {**held.values, OPTIM: merged}
