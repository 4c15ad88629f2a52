"""manifest: identity of encode and decode, and every way in which a manifest can fail to be one."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, Manifest, TensorEntry
from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, NotCommitted
from holdfast_formats.tensors import TensorSpec
from tests.formats.strategies import manifest_of, sample_manifest, specs

Document = dict[str, Any]
ENCODED = manifests.encode(sample_manifest())
COMMIT = manifests.encode_commit(sample_manifest(), ENCODED)


def vouched(encoded: bytes) -> bytes:
    """A COMMIT that is right about these bytes, so that only the manifest's own rules can refuse them."""
    try:
        files = [entry["bytes"] for entry in json.loads(encoded)["files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        files = []
    return msgspec.json.encode(manifests.Commit(1, hashlib.sha256(encoded).hexdigest(), sum(files), len(files))) + b"\n"


@given(specs(), st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False)))
def test_decode_gives_back_what_encode_took(tensors: list[TensorSpec], metrics: dict[str, float]) -> None:
    """A manifest of any tensors survives the disk unchanged, floating-point numbers included."""
    made = manifest_of(tensors, metrics=metrics)
    encoded = manifests.encode(made)
    assert manifests.decode(encoded, manifests.encode_commit(made, encoded)) == made


def test_the_sample_says_what_it_holds() -> None:
    """Groups, sizes and files can be asked for."""
    made = manifests.decode(ENCODED, COMMIT)
    assert made.groups == ("model", "optim")
    assert made.bytes == sum(file.bytes for file in made.files)
    assert made.file("optim.safetensors") in made.files
    assert made.file("nothing.safetensors") is None
    assert made.tensors["model"]["a"].nbytes == 48
    assert len(made.tensors["model"]["a"].extents) == 2
    assert made.tensors["model"]["empty"].extents == ()
    assert json.loads(COMMIT) == {
        "format": 1,
        "manifest_sha256": hashlib.sha256(ENCODED).hexdigest(),
        "bytes": made.bytes,
        "files": len(made.files),
    }


def test_equal_words_and_shapes_are_kept_once() -> None:
    """Of 100 000 tensors most have the shape, dtype, file and placement of others."""
    made = manifest_of([TensorSpec("model", name, "BF16", (300, 2)) for name in "abc"], 2**20)
    encoded = manifests.encode(made)
    decoded = manifests.decode(encoded, manifests.encode_commit(made, encoded))
    first, *others = decoded.tensors["model"].values()
    assert decoded == made and len(others) == 2
    for other in others:
        assert all(getattr(other, field) is getattr(first, field) for field in ("dtype", "shape", "file", "placement"))


@given(st.sampled_from(["manifest", "commit"]), st.data())
def test_one_changed_byte_is_always_refused(which: str, data: st.DataObject) -> None:
    """Whichever byte of manifest.json or COMMIT changes, and into whatever, the checkpoint is refused by name (I5)."""
    files = {"manifest": bytearray(ENCODED), "commit": bytearray(COMMIT)}
    at = data.draw(st.integers(0, len(files[which]) - 1))
    files[which][at] = data.draw(st.integers(0, 255).filter(lambda value: value != files[which][at]))
    with pytest.raises((CorruptManifest, NotCommitted)):
        manifests.decode(bytes(files["manifest"]), bytes(files["commit"]))


@given(st.data())
def test_a_shortened_or_lengthened_file_is_refused(data: st.DataObject) -> None:
    """A torn write of either file, and bytes behind its end, are refused."""
    cut = data.draw(st.integers(0, len(COMMIT) - 1))
    for changed in (COMMIT[:cut], COMMIT + b"\n", b""):
        with pytest.raises((CorruptManifest, NotCommitted)):
            manifests.decode(ENCODED, changed)
    for changed in (ENCODED[:cut], ENCODED + b"\n", b""):
        with pytest.raises(CorruptManifest, match=r"the digest of manifest\.json differs from the one in COMMIT"):
            manifests.decode(changed, COMMIT)


def parent(document: Document, path: tuple[str | int, ...]) -> Any:
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    return inner


def put(*path: str | int, value: Any) -> Callable[[Document], None]:
    """A change: the value at this path of the document."""

    def change(document: Document) -> None:
        parent(document, path)[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        del parent(document, path)[path[-1]]

    return change


def add_file(**fields: Any) -> Callable[[Document], None]:
    entry = {"name": "config.json", "bytes": 2, "header_bytes": 0, "digest": "0" * 16}
    return lambda document: document["files"].append(entry | fields)


A = ("tensors", "model", "a")  # 48 bytes of F32 in two extents of 24
B = ("tensors", "model", "b")
DIGEST = "0" * 16

BROKEN: dict[str, tuple[Callable[[Document], None], str]] = {
    "another format": (put("format", value=2), "format 2"),
    "impossible run": (put("run", value="../up"), "run name"),
    "impossible step": (put("step", value=-1), "step must be"),
    "impossible attempt": (put("attempt", value=-1), "attempt -1"),
    "impossible world": (put("world", value=0), "world size 0"),
    "impossible group": (put("tensors", "../x", value={}), "group name"),
    "extent hole": (put(*A, "extents", 1, 0, value=28), "does not follow 24"),
    "extent overlap": (put(*A, "extents", 1, 0, value=20), "does not follow 24"),
    "extents in another order": (lambda d: d["tensors"]["model"]["a"]["extents"].reverse(), "does not follow 0"),
    "extents too short": (drop(*A, "extents", 1), "cover 24 of 48"),
    "extents too long": (put(*A, "extents", 1, 1, value=28), "cover 52 of 48"),
    "empty extent": (put(*A, "extents", 1, 1, value=0), "does not follow"),
    "negative extent": (put(*A, "extents", 1, 1, value=-24), "does not follow"),
    "extent inside an element": (put(*A, "extents", value=[[0, 22, DIGEST], [22, 26, DIGEST]]), "does not follow"),
    "bytes for an empty tensor": (put("tensors", "model", "empty", "extents", value=[[0, 4, DIGEST]]), "cover 4 of 0"),
    "bad extent digest": (put(*A, "extents", 0, 2, value="0" * 15), "not an xxh3-64 digest"),
    "capital digest": (put(*A, "extents", 0, 2, value="A" * 16), "not an xxh3-64 digest"),
    "no extent digest": (put(*A, "extents", 0, 2, value=""), "not an xxh3-64 digest"),
    "bad file digest": (put("files", 0, "digest", value="x" * 16), "not an xxh3-64 digest"),
    "tensor begins late": (put(*A, "start", value=4100), "begins at"),
    "tensors overlap": (put(*B, "start", value=4096), "begins at"),
    "tensor over the header": (put(*A, "start", value=0), "begins at"),
    "tensor larger than the file's rest": (put(*A, "shape", value=[4, 4]), "cover 48 of 64"),
    "bytes behind the tensors": (put("files", 0, "bytes", value=4200), "its tensors end at"),
    "file cut short": (put("files", 0, "bytes", value=4100), "its tensors end at"),
    "header longer than the file": (put("files", 0, "header_bytes", value=10**6), "impossible name or header"),
    "negative header": (put("files", 0, "header_bytes", value=-1), "impossible name or header"),
    "a name twice in a file": (
        put("tensors", "ema", value={"empty": {**json.loads(ENCODED)["tensors"]["model"]["empty"]}}),
        "two tensors of the same name",
    ),
    "tensor in no file": (drop("tensors", "model", "b"), "begins at|end at"),
    "file not listed": (drop("files", 0), "not a listed shard file"),
    "unknown file": (put(*A, "file", value="other.safetensors"), "not a listed shard file"),
    "tensor in a small file": (put(*A, "file", value="model.safetensors.index.json"), "not a listed shard file"),
    "file twice": (lambda d: d["files"].append(d["files"][0]), "listed twice"),
    "file that is a path": (add_file(name="../config.json"), "impossible name"),
    "hidden file": (add_file(name=".hidden"), "impossible name"),
    "file named COMMIT": (add_file(name="COMMIT"), "impossible name"),
    "file named manifest.json": (add_file(name="manifest.json"), "impossible name"),
    "unknown dtype": (put(*A, "dtype", value="F31"), "unknown dtype"),
    "half a byte": (put(*A, value={"dtype": "F4", "shape": [1], "file": "x", "start": 0, "extents": []}), "listed shard"),
    "elements end inside a byte": (lambda d: d["tensors"]["model"]["a"].update(dtype="F4", shape=[3]), "fill whole bytes"),
    "negative sizes": (put(*A, "shape", value=[-4, -3]), "is not a shape"),
    "too many dimensions": (put(*A, "shape", value=[1] * 65), "is not a shape"),
    "tensor without a name": (
        lambda d: d["tensors"]["model"].update({"": d["tensors"]["model"].pop("b")}),
        "1 to 1024 bytes",
    ),
    "tensor named __metadata__": (
        lambda d: d["tensors"]["model"].update(__metadata__=d["tensors"]["model"].pop("b")),
        "reserves that name",
    ),
    "alias of nothing": (put("aliases", "model", "tied", value="nothing"), "does not resolve"),
    "alias of an alias": (put("aliases", "model", "again", value="tied"), "does not resolve"),
    "alias over a tensor": (put("aliases", "model", "b", value="a"), "does not resolve"),
    "alias in another group": (put("aliases", "ema", value={"tied": "a"}), "does not resolve"),
}
ILL_TYPED: dict[str, Callable[[Document], None]] = {
    "missing field": drop("files"),
    "text for a number": put("step", value="500"),
    "fraction": put("step", value=0.5),
    "truth value": put("step", value=True),
    "null metric": put("metrics", "loss", value=None),
    "extent of two": put(*A, "extents", 0, value=[0, 24]),
    "extent as an object": put(*A, "extents", 0, value={"offset": 0}),
    "a list of tensors": put("tensors", value=[]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_manifest_that_does_not_fit_together_is_refused(case: str) -> None:
    """Although COMMIT vouches for the bytes, the broken rule is found and named; and such a manifest is never written."""
    change, reason = BROKEN[case]
    document = json.loads(ENCODED)
    change(document)
    encoded = json.dumps(document).encode()
    with pytest.raises(CorruptManifest, match=reason):
        manifests.decode(encoded, vouched(encoded))
    with pytest.raises(CorruptManifest, match=reason):
        manifests.encode(msgspec.json.decode(encoded, type=Manifest))


@pytest.mark.parametrize("case", ILL_TYPED)
def test_a_manifest_of_other_types_is_refused(case: str) -> None:
    """Fields that are missing or of another JSON type are refused, never converted."""
    document = json.loads(ENCODED)
    ILL_TYPED[case](document)
    encoded = json.dumps(document).encode()
    with pytest.raises(CorruptManifest, match="cannot read"):
        manifests.decode(encoded, vouched(encoded))


@pytest.mark.parametrize(
    "encoded", [b"", b"[]", b"null", b"\xff", b'{"run":"\xff"}', b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"]
)
def test_what_is_not_a_manifest_is_refused(encoded: bytes) -> None:
    """Vouched bytes that are no manifest at all: not JSON, not UTF-8, or nested too deep."""
    with pytest.raises(CorruptManifest, match="cannot read"):
        manifests.decode(encoded, vouched(encoded))


def test_fields_of_later_versions_are_ignored() -> None:
    """A field that this version does not know does not make a checkpoint unreadable."""
    document = json.loads(ENCODED) | {"later": {"x": [1]}}
    encoded = json.dumps(document).encode()
    assert manifests.decode(encoded, vouched(encoded)) == sample_manifest()


@given(st.binary(max_size=80))
def test_random_bytes_give_named_errors(noise: bytes) -> None:
    """Noise as manifest, as COMMIT, or inside either is refused by name."""
    for encoded, commit in [(noise, COMMIT), (ENCODED, noise), (noise, vouched(noise)), (noise, noise)]:
        with pytest.raises((CorruptManifest, NotCommitted)):
            manifests.decode(encoded, commit)


@pytest.mark.parametrize("field", ["bytes", "files"])
def test_commit_that_counts_otherwise_is_refused(field: str) -> None:
    """COMMIT's counts are part of the proof."""
    commit = json.loads(COMMIT)
    commit[field] += 1
    with pytest.raises(CorruptManifest, match="the manifest has"):
        manifests.decode(ENCODED, msgspec.json.encode(commit) + b"\n")


@pytest.mark.parametrize("change", [{"format": 2}, {"more": 1}, {"format": None}, {"manifest_sha256": 7}])
def test_commit_of_another_kind_is_not_one(change: Document) -> None:
    """Another format, an unknown field or another type: the directory does not count as committed."""
    with pytest.raises(NotCommitted):
        manifests.decode(ENCODED, msgspec.json.encode(json.loads(COMMIT) | change) + b"\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_metrics_that_json_cannot_state_are_refused(value: float) -> None:
    """NaN would be written as null, which does not read back: it is refused here, and belongs in the other field."""
    with pytest.raises(InvalidRequest, match="'loss'"):
        manifests.check_metrics({"loss": value}, {})
    with pytest.raises(CorruptManifest, match="'loss'"):
        manifests.encode(manifest_of([], metrics={"loss": value}))


def test_metrics_that_are_not_finite_have_a_field_of_their_own() -> None:
    """Read back as they were. Any other word is refused, and a metric that is in both fields."""
    made = msgspec.structs.replace(manifest_of([], metrics={"lr": 0.5}), nonfinite_metrics={"loss": "NaN", "x": "-Infinity"})
    encoded = manifests.encode(made)
    found = manifests.decode(encoded, manifests.encode_commit(made, encoded)).all_metrics
    assert math.isnan(found.pop("loss")) and found == {"lr": 0.5, "x": -math.inf}
    assert "nonfinite_metrics" not in json.loads(ENCODED), "older manifests have the same bytes"
    for wrong in ({"loss": "nan"}, {"loss": 1.0}, {"lr": "NaN"}):
        changed = json.dumps({**json.loads(encoded), "nonfinite_metrics": wrong}).encode()
        with pytest.raises(CorruptManifest):
            manifests.decode(changed, vouched(changed))


def test_an_extent_has_a_largest_size() -> None:
    """16 MiB in one extent are allowed, one element more is not."""
    for length, allowed in ((EXTENT_BYTES_MAX, True), (EXTENT_BYTES_MAX + 1, False)):
        made = manifest_of([])
        tensor = TensorEntry("U8", (length,), "model.safetensors", 4096, (Extent(0, length, DIGEST),))
        file = manifests.FileEntry("model.safetensors", 4096 + length, 4096, DIGEST)
        made = msgspec.structs.replace(made, files=(file,), tensors={"model": {"w": tensor}})
        if allowed:
            manifests.validate(made)
        else:
            with pytest.raises(CorruptManifest, match="does not follow"):
                manifests.validate(made)


def test_every_refusal_says_what_to_do() -> None:
    """A damaged checkpoint's error has a hint."""
    for encoded, commit in [(ENCODED, b""), (b"", COMMIT), (b"{}", vouched(b"{}"))]:
        with pytest.raises(CheckpointError) as caught:
            manifests.decode(encoded, commit)
        assert "restore another step" in caught.value.hint


def test_a_kept_manifest_is_decoded_once() -> None:
    """Of the same bytes, and with a COMMIT that belongs to them; what nothing keeps takes no memory."""
    made = sample_manifest()
    encoded = manifests.encode(made)
    commit = manifests.encode_commit(made, encoded)
    first = manifests.decode(encoded, commit)
    assert first == made and first is not made
    assert manifests.decode(encoded, commit) is first
    with pytest.raises(CorruptManifest):
        manifests.decode(encoded + b" ", commit)
    with pytest.raises(CorruptManifest):
        manifests.decode(encoded, commit.replace(b'"files":', b'"files":1'))
    manifests.lend(made, commit)
    assert manifests.decode(encoded, commit) is made
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
