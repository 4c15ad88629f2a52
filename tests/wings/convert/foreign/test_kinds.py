"""A directory is of the one kind that fits; none and two are refused, and a user may say which."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.rest.jobs import EXPORT_KINDS, IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports import kinds as exports
from holdfast_service.wings.convert.foreign import known_kinds
from holdfast_service.wings.convert.foreign.kinds import ForeignKind, choose
from tests.kit.files import FilesInMemory


def _kind(name: str, ending: str) -> ForeignKind:
    def read(files: Files, options: ReadOptions) -> ForeignListing:
        return ForeignListing(name, {}, ())

    return ForeignKind(name, name.upper(), lambda files: any(file.endswith(ending) for file in files.list("")), read)


A, B = _kind("a", ".a"), _kind("b", ".b")


def test_the_kinds_that_requests_and_pages_state() -> None:
    """Names and titles of the option models are those of the readers and exporters, in their order."""
    assert {kind.name: kind.title for kind in known_kinds.KINDS} == IMPORT_KINDS
    assert {kind.name: kind.title for kind in exports.KINDS} == EXPORT_KINDS


def test_the_one_that_fits() -> None:
    """By its files, or by what a user says."""
    assert choose(FilesInMemory({"x.a": b""}), None, (A, B)) is A
    assert choose(FilesInMemory({"x.a": b"", "x.b": b""}), "b", (A, B)) is B


def test_a_last_choice() -> None:
    """A kind whose files others have too is taken where no other fits."""
    last = A._replace(name="last", last=True)
    files = FilesInMemory({"x.a": b"", "x.b": b""})
    assert choose(files, None, (last, B)) is B
    assert choose(files, None, (last,)) is last


def test_none_and_two_are_refused() -> None:
    """With what was found, and what to do."""
    with pytest.raises(StateMismatch, match=r"no known kind of checkpoint has these files: x\.c"):
        choose(FilesInMemory({"x.c": b""}), None, (A, B))
    with pytest.raises(StateMismatch, match="may be A or B") as caught:
        choose(FilesInMemory({"x.a": b"", "x.b": b""}), None, (A, B))
    assert caught.value.hint == "choose one: --from a, or --from b"
    with pytest.raises(InvalidRequest, match="unknown kind 'c'"):
        choose(FilesInMemory({}), "c", (A, B))


def test_a_hint_names_an_option_that_helps() -> None:
    """Where a reader gives none: the import is tried with it, in this order: the tensor, the file, the weights alone."""
    spec = TensorSpec("model", "w", "F32", (1,))

    def read(files: Files, options: ReadOptions) -> ForeignListing:
        if "x.a" not in files.list(""):
            raise StateMismatch("there is no x.a", file="x.a")
        if "y" in files.list("") and not options.weights_only:
            raise StateMismatch("y is odd", file="z" if "z" in files.list("") else "y", tensor="w")
        return ForeignListing("a", {TensorKey("model", "w"): ForeignTensor(spec, ())}, ())

    def hint(*names: str) -> str:
        with pytest.raises(StateMismatch) as refused:
            A._replace(lists=read).read(FilesInMemory(dict.fromkeys(names, b"")), ReadOptions())
        return refused.value.hint

    again = "copy it again from its source, or save it again with the program that wrote it"
    assert hint("x.a", "y") == f"{again}; or, if it is not needed, go on without: --leave-out y"
    assert hint("x.a", "y", "z") == f"{again}; or import the weights alone: --weights-only"
    assert hint("y") == again
