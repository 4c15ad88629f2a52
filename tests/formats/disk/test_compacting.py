"""Which tensors a rule stores in fewer bytes: by name, dtype and size; what it does not know is not one of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.disk import coded, codings, manifests
from holdfast_formats.disk.compacted import CodedTensor, Compacted
from holdfast_formats.disk.compacting import RULES, CodingCandidate, Encoded, candidates, plan, small_bytes, together
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.rest import bodies
from tests.checkpoints import Built, build, trained_arrays, varied_arrays
from tests.in_memory import tmp_path

__all__ = ["tmp_path"]
AT = "2030-01-01T00:00:00.000Z"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "whole", trained_arrays(), file_bytes_max=10**9)


def chosen(made: Manifest, rule: str) -> dict[str, str]:
    return {f"{one.group}/{one.name}": one.coding for one in candidates(made, rule)}


def test_what_a_rule_is_for(built: Built) -> None:
    """Moments that are known by name, in F32, and masters whose BF16 weight is there."""
    masters = {f"master/{name}": "low16" for name in trained_arrays()["master"]}
    assert chosen(built.manifest, "exact") == masters
    moments = [name for name in trained_arrays()["optim"] if name.endswith(("/exp_avg", "/exp_avg_sq"))]
    assert chosen(built.manifest, "bf16") == masters | {f"optim/{name}": "bf16" for name in moments}
    int8 = chosen(built.manifest, "int8")
    assert int8["optim/embed.weight/exp_avg"] == "int8" and int8["optim/embed.weight/exp_avg_sq"] == "int8-log"
    assert int8["optim/layers.0.conv.weight/exp_avg"] == "bf16"  # rows of three elements


def test_what_has_nothing_to_save(built: Built, tmp_path: Path) -> None:
    """Other dtypes, names that are taken, and one that is compact or thin already."""
    other = build(tmp_path / "other", varied_arrays())
    assert all(not chosen(other.manifest, rule) for rule in RULES) and small_bytes(other.manifest) == {}
    arrays = {group: dict(named) for group, named in trained_arrays().items()}
    arrays["optim"]["embed.weight/exp_avg.q8"] = np.zeros(3, np.int8)
    taken = build(tmp_path / "taken", arrays)
    assert "optim/embed.weight/exp_avg" not in chosen(taken.manifest, "int8")
    assert "optim/embed.weight/exp_avg" in chosen(taken.manifest, "bf16")
    sizes = small_bytes(built.manifest)
    assert built.manifest.bytes > sizes["exact"] > sizes["bf16"] > sizes["int8"]
    assert bodies.describe(built.manifest).small_bytes == sizes
    with pytest.raises(StateMismatch, match="too strange"):
        plan(
            built.manifest, b"", "bf16", [Encoded(one, left="too strange") for one in candidates(built.manifest, "bf16")], AT
        )


FAMILIES = {
    "exp_avg exp_avg_sq": ("int8", "int8-log"),
    "exp_avg exp_avg_sq max_exp_avg_sq": ("int8", "bf16", "bf16"),  # the maximum stays one: both are rounded value by value
    "exp_avg exp_inf": ("int8", "int8-log"),
    "square_avg": ("int8-log",),
    "square_avg momentum_buffer": ("int8-log", "int8"),
    "square_avg acc_delta": ("int8-log", "int8-log"),
    "square_avg grad_avg": (),  # a centered RMSprop subtracts the square of one from the other
    "square_avg grad_avg momentum_buffer": (),
    "exp_avg exp_avg_sq exp_avg_diff neg_pre_grad": (),  # Adan
    "exp_avg": (),
    "exp_avg_sq": (),
}


@pytest.mark.parametrize("keys", FAMILIES)
def test_states_of_a_parameter_are_coded_together_or_not_at_all(tmp_path: Path, keys: str) -> None:
    """Those that a step subtracts or compares; of a set of states that is not known, none. Counts do not matter."""
    names = [f"w/{key}" for key in keys.split()]
    optim = dict.fromkeys(names, np.ones((8, 64), np.float32)) | {"w/step": np.array(3.0, np.float32)}
    optim["w/seen"] = np.arange(400)
    made = build(tmp_path / "family", {"model": {}, "optim": optim}).manifest
    assert chosen(made, "int8") == dict(zip((f"optim/{name}" for name in names), FAMILIES[keys], strict=False))
    assert chosen(made, "bf16") == dict.fromkeys(chosen(made, "int8"), "bf16")
    for odd in names:
        mixed = build(tmp_path / odd.replace("/", "-"), {"model": {}, "optim": optim | {odd: np.ones((8, 64), np.float16)}})
        assert chosen(mixed.manifest, "bf16") == {}


def test_what_stays_keeps_what_is_beside_it() -> None:
    """A state whose values cannot be coded leaves no other one of its parameter coded; other parameters do not matter."""
    entry = TensorEntry("F32", (8, 64), "f", 0, ())
    found = [
        Encoded(CodingCandidate("optim", name, "bf16", entry), left="it has NaN" if name == "a/exp_avg" else "")
        for name in ("a/exp_avg", "a/exp_avg_sq", "b/exp_avg")
    ]
    assert [one.left for one in together(found)] == ["it has NaN", "exp_avg also stays as it is: it has NaN", ""]


def test_aliases_of_masters_stay_aliases(tmp_path: Path) -> None:
    """They are kept where an earlier version does not look for their target."""
    aliases = {"model": {"lm_head.weight": "embed.weight"}, "master": {"lm_head.weight": "embed.weight"}}
    made = build(tmp_path / "tied", trained_arrays(), aliases=aliases).manifest
    one = next(found for found in candidates(made, "exact") if found.name == "embed.weight")
    planned = plan(made, b"", "exact", [Encoded(one)], AT)
    assert planned.compacted.aliases == {"master": {"lm_head.weight": "embed.weight"}}


@pytest.mark.parametrize("file_bytes_max", [1, 20_000, 90_000, 10**9])
def test_files_are_no_larger_than_those_of_its_run(tmp_path: Path, file_bytes_max: int) -> None:
    """By whatever limit that run packs, which no manifest says."""
    made = build(tmp_path / "packed", trained_arrays(), file_bytes_max=file_bytes_max).manifest
    planned = plan(made, b"", "bf16", [Encoded(one) for one in candidates(made, "bf16")], AT)
    held = [entry for named in made.tensors.values() for entry in named.values()]
    largest = max(sum(entry.nbytes for entry in held if entry.file == file.name) for file in made.files)
    sizes = [sum(spec.nbytes for spec, _ in file.tensors) for file in planned.files]
    assert max(sizes) <= largest
    assert len(planned.files) == 2 if file_bytes_max == 10**9 else len(planned.files) > 2
    stored = {(spec.group, spec.name) for file in planned.files for spec, _ in file.tensors}
    assert len(stored) == sum(len(file.tensors) for file in planned.files)


def broken(made: Manifest, **changes: object) -> Manifest:
    one = CodedTensor("bf16", "F32", (8, 8), 0.1)
    told = Compacted(AT, "bf16", made.bytes, "0" * 64, {"optim": {"x/exp_avg": one}})
    return msgspec.structs.replace(made, compacted=msgspec.structs.replace(told, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},  # its parts are not there
        {"bytes": 1},
        {"manifest_sha256": "x"},
        {"tensors": {}},
        {"tensors": {"optim": {"embed.weight/step": CodedTensor("bf16", "F32", (), 0.1)}}},
        {"tensors": {"optim": {"x": CodedTensor("bf16", "F32", (2,), float("nan"))}}},
        {"tensors": {"model": {"x": CodedTensor("later", "F32", (2,), 0.0)}}, "aliases": {"model": {"y": "z"}}},
        {"tensors": {"another": {"x": CodedTensor("later", "F32", (2,), 0.0)}}},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(built: Built, changes: dict) -> None:
    with pytest.raises(CorruptManifest):
        manifests.validate(broken(built.manifest, **changes))


def test_contents_are_in_the_order_of_what_is_stored(tmp_path: Path) -> None:
    """Each tensor where its parts are, with how it is stored; tensors of zeros can be told by their digests."""
    rng = np.random.default_rng(1)
    values = {name: rng.standard_normal((8, 300)).astype(np.float32) for name in ("a/exp_avg", "b/exp_avg")}
    values["c/exp_avg"] = np.zeros((8, 300), np.float32)
    stored = {"b/exp_avg": values["b/exp_avg"], "a/step": np.array(3, np.float32)}
    for name in ("a/exp_avg", "c/exp_avg"):
        parts = codings.encode("int8", values[name])
        stored |= {name + part.suffix: parts[role] for role, part in codings.PARTS["int8"].items()}
    whole = build(tmp_path / "stored", {"model": {}, "optim": stored}).manifest
    told = {
        name: CodedTensor("int8", "F32", (8, 300), 0.01 if name[0] == "a" else 0.0) for name in ("a/exp_avg", "c/exp_avg")
    }
    made = msgspec.structs.replace(whole, compacted=Compacted(AT, "int8", whole.bytes, "0" * 64, {"optim": told}))
    manifests.validate(made)
    shown = coded.contents(made).tensors["optim"]
    assert sorted(shown) == ["a/exp_avg", "a/step", "b/exp_avg", "c/exp_avg"]
    assert list(shown) == list(
        dict.fromkeys(name.removesuffix(".scale").removesuffix(".q8") for name in whole.tensors["optim"])
    )
    assert bodies.describe(made).tensors == coded.count(made) == 4
    form = coded.stored_form(made, "optim", "a/exp_avg")
    assert form is not None and str(form) == "int8, off by 0.01"
    assert (form.parts, form.bytes) == (("a/exp_avg.q8", "a/exp_avg.q8.scale"), 8 * 300 + 8 * 2 * 4)
    assert coded.stored_form(made, "optim", "b/exp_avg") is None
    assert [coded.is_zeros(shown[name]) for name in ("a/exp_avg", "b/exp_avg", "c/exp_avg")] == [False, False, True]


def test_contents_are_those_that_were_saved(built: Built) -> None:
    """Of one that is not compact, the manifest itself."""
    assert coded.contents(built.manifest) is built.manifest
    assert coded.find(built.manifest, "optim", "embed.weight/exp_avg") is None
    assert naming.STATE in {file.name for file in built.manifest.files}
