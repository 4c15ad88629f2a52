"""The inputs of a merge: checkpoints of the root, and directories of other programs, in one name space.

A file of the model with number N is `N/name` there; a name without a number is a small file of the model whose configuration
the result gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from holdfast_files.opened import join, open_checkpoint
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX
from holdfast_formats.errors import CheckpointError, NoSuchResource, Refused, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import FetchBox, FileUse, ForeignListing, ForeignPiece, ForeignTensor
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.storage import Buffer, read_once
from holdfast_service.wings.convert.exports.source import of_committed
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS

KEPT_BYTES_MAX = 2**27  # verified extents that all checkpoints of a merge keep together


class ModelPlace(NamedTuple):
    """A model's directory in a tier, with its name for messages."""

    name: str
    files: Files
    directory: str = ""


class MergeSource(NamedTuple):
    """An input model or adapter. Its tensors and files have their names in the common name space."""

    name: str
    number: int
    listing: ForeignListing
    told: Mapping[str, Any]  # its entry in state.json
    ties: Mapping[str, Mapping[str, str]] = {}  # by group: other names of tied tensors, with the names they are stored under

    def tensors(self, *groups: str) -> dict[str, ForeignTensor]:
        """The tensors of the first of these groups that it has, by name."""
        for group in groups:
            found = {key.name: one for key, one in self.listing.tensors.items() if key.group == group}
            if found:
                return found
        return {}


class RoutedFiles:
    """Files that are other `Files`' under another name: `route` says whose, and the name there."""

    def __init__(self, label: str, route: Callable[[str], tuple[Files, str]]) -> None:
        self.label, self._route = label, route

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        files, name = self._route(path)
        return files.read(name, offset, length)

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        files, name = self._route(path)
        return files.read_into(name, offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Buffer) -> int:
        files, name = self._route(path)
        return files.read_stored(name, offset, buffer)

    def size(self, path: str) -> int | None:
        files, name = self._route(path)
        return files.size(name)

    def list(self, path: str) -> list[str]:
        files, name = self._route(path)
        return files.list(name)

    def stamp(self, path: str) -> str:
        files, name = self._route(path)
        return files.stamp(name)


def joined(places: Sequence[Files], plain: int) -> RoutedFiles:
    """The files of several directories, `N/name` in the N-th of them; other names are in the one with number `plain`."""

    def route(path: str) -> tuple[Files, str]:
        number, slash, name = path.partition("/")
        if slash and number.isascii() and number.isdigit() and int(number) < len(places):
            return places[int(number)], name
        return places[plain], path

    return RoutedFiles(", ".join(place.label for place in places), route)


class MergeSources(NamedTuple):
    watched: WatchedSource
    by_name: Mapping[str, MergeSource]

    def source(self, name: str) -> MergeSource:
        return self.by_name[name]


def read_sources(places: Sequence[ModelPlace], assets_of: str) -> MergeSources:
    """Read every place's listing, without tensors; `assets_of` names the model that has the small files. `StateMismatch` and
    others, with the model's name, for unsupported contents; `Damaged` for a checkpoint that does not match its digests.
    """
    share = min(KEPT_BYTES_MAX // max(len(places), 1), EXTENT_BYTES_MAX)
    exports = [_committed(place, share) for place in places]
    pairs = zip(places, exports, strict=True)
    plain = [place.name for place in places].index(assets_of)
    files = joined([read_once(place.files) if own is None else own.files for place, own in pairs], plain)
    ours = {str(number) for number, own in enumerate(exports) if own is not None}  # what is read of them is verified
    directories = [place.name for place in places]
    watched = WatchedSource(files, lambda path: path.partition("/")[0] not in ours, lambda path: _shown(path, directories))
    sources = {}
    for number, (place, own) in enumerate(zip(places, exports, strict=True)):
        try:
            sources[place.name] = _ours(place, number, own) if own is not None else _foreign(place, number, watched)
        except CheckpointError as error:
            error.detail = f"{place.name}: {error.detail}"
            raise
    return MergeSources(watched, sources)


def _shown(path: str, directories: Sequence[str]) -> str:
    """A name of the common name space as the recipe's author knows it."""
    number, slash, name = path.partition("/")
    if slash and number.isascii() and number.isdigit() and int(number) < len(directories):
        return f"{directories[int(number)].removesuffix('/')}/{name}"
    return path


class _Own(NamedTuple):
    files: CommittedFiles
    listing: ForeignListing
    commit: bytes
    run: str
    step: int
    ties: Mapping[str, Mapping[str, str]]


def _committed(place: ModelPlace, kept_bytes_max: int) -> _Own | None:
    """A Holdfast checkpoint; None for the directory of another program."""
    directory = place.directory
    if place.files.size(join(directory, naming.COMMIT)) is None:
        if directory:
            raise NoSuchResource(f"{place.name} has no {naming.COMMIT}", hint="merge a committed checkpoint")
        return None
    pair = open_checkpoint(place.files, directory)
    files = CommittedFiles(read_once(place.files), pair.manifest, directory, kept_bytes_max)
    source, manifest = of_committed(files, pair.manifest), pair.manifest
    return _Own(files, source.listing, pair.commit, manifest.run, manifest.step, source.aliases)


def _ours(place: ModelPlace, number: int, own: _Own) -> MergeSource:
    report = {"model": place.name, "run": own.run, "step": own.step, "commit": digest(own.commit)}
    return MergeSource(place.name, number, _numbered(own.listing, number)._replace(files=()), report, own.ties)


def _foreign(place: ModelPlace, number: int, watched: WatchedSource) -> MergeSource:
    files = RoutedFiles(f"directory {number}", lambda path: (watched, f"{number}/{path}"))
    try:
        kind = choose(files, None, KINDS)
    except StateMismatch as error:
        error.hint = "import it first with `holdfast import`, then merge the checkpoint"
        raise
    try:
        listing = kind.read(files, ReadOptions())
    except Refused as error:
        error.hint = "import it first with `holdfast import`, which can leave parts out, then merge the checkpoint"
        raise
    report = {"model": place.name, "kind": kind.name, "files": f"{number}/"}
    return MergeSource(place.name, number, _numbered(listing, number), report)


def _numbered(listing: ForeignListing, number: int) -> ForeignListing:
    """The listing with names of the common name space. Small files keep theirs."""
    tensors = {key: placed(tensor, number) for key, tensor in listing.tensors.items()}
    files = tuple(FileUse(f"{number}/{use.file}", use.use, use.reason) for use in listing.files)
    return listing._replace(tensors=tensors, files=files)


def placed(tensor: ForeignTensor, number: int) -> ForeignTensor:
    decoder = None if tensor.decoder is None else PlacedDecoder(tensor.decoder, number)
    return tensor._replace(pieces=_pieces(tensor.pieces, number), copies=_pieces(tensor.copies, number), decoder=decoder)


def _pieces(pieces: tuple[ForeignPiece, ...], number: int) -> tuple[ForeignPiece, ...]:
    return tuple(piece._replace(file=f"{number}/{piece.file}") for piece in pieces)


class PlacedDecoder(NamedTuple):
    decoder: Any
    number: int

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return tuple(placed(one, self.number) for one in self.decoder.inputs)

    @property
    def terms(self) -> object:
        return type(self.decoder).__name__, getattr(self.decoder, "terms", None)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        def placed_fetch(stored: ForeignTensor, wanted: Box, into: NDArray[Any] | None = None) -> NDArray[Any]:
            return fetch(placed(stored, self.number), wanted, into)

        array: NDArray[Any] = self.decoder.decode(box, placed_fetch)
        return array
