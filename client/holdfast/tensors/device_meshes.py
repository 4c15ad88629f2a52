"""Which ranks share rows and tensors, as far as the device mesh of the state's DTensors tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from holdfast.tensors.fragments import Storable, is_dtensor, is_sharded
from holdfast.tensors.live_pieces import dimensions, root_mesh
from holdfast_formats.layout import successors
from holdfast_formats.layout.mesh import Mesh


class KnownMesh(NamedTuple):
    """The mesh of the ranks, if it is known; `unclear` says why not, where ranks may share tensors all the same."""

    mesh: Mesh | None
    unclear: str = ""


def mesh_of(values: Iterable[Storable], world: int, fully_sharded: bool) -> KnownMesh:
    """The mesh of a world whose ranks hold these tensors; `fully_sharded`: a module among them is FSDP2's.

    Ranks with whole tensors are replicas. Fragments do not say which ranks share tensors.
    """
    meshes: dict[Any, None] = {}
    for value in values:
        if is_dtensor(value):
            meshes[root_mesh(value.device_mesh)] = None  # type: ignore[union-attr]
        elif is_sharded(value):
            return KnownMesh(None)
    if not meshes:
        return KnownMesh(successors.of_dimensions({"dp": world}, world))
    mesh, *others = meshes
    sizes = dimensions(mesh)
    if others or mesh.mesh.flatten().tolist() != list(range(world)):
        return KnownMesh(None, f"their device mesh {tuple(sizes)} is not one of all ranks, row by row")
    found = successors.of_dimensions({"fsdp": world} if mesh.ndim == 1 and fully_sharded else sizes, world)
    return KnownMesh(found, "" if found else f"their device mesh has the dimensions {tuple(sizes)}")
