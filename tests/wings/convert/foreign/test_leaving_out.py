"""Parts of a source are left out by name, and listed; a refused part that stays is an error that says how to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast_formats.errors import CheckpointError, InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing, PartLeftOut
from holdfast_formats.rest.jobs import ImportArguments, ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert import importing
from holdfast_service.wings.convert.foreign import leaving_out
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.leaving_out import HidingFiles, matching
from tests.kit.files import FilesInMemory
from tests.wings.convert.foreign.dcp.saving import save_ranks

WEIGHTS = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(3)}


class Config:
    """An object that no reader takes for a value."""


def read(directory: Path, *leave_out: str, weights_only: bool = False) -> ForeignListing:
    options = ReadOptions(leave_out=leave_out, weights_only=weights_only)
    files = hub_snapshot.opened(directory)
    listing = choose(files, None, KINDS, leave_out).read(files, options)
    assert not listing.refused and sorted(use.file for use in listing.files) == files.list("")
    return listing


def left(listing: ForeignListing) -> dict[str, str]:
    return {part.what: part.reason for part in listing.left_out}


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A model beside an optimizer of other parameters, an object, and values."""
    optimizer = {"state": {"gone": {"m": torch.ones(9)}}, "param_groups": [{"params": ["gone"]}]}
    value = {"state_dict": dict(WEIGHTS), "optimizer": optimizer, "cfg": {"made": Config(), "lr": 0.1}, "epoch": 3}
    torch.save(value, tmp_path / "run.pt")
    return tmp_path


def test_a_refusal_says_how_to_go_on(training: Path) -> None:
    """The error names every part that is refused as an option, and with all of them the rest is imported."""
    with pytest.raises(StateMismatch, match=r"run\.pt has the optimizer 'optimizer'") as refused:
        read(training)
    assert refused.value.hint.endswith("go on without: --leave-out optimizer --leave-out cfg, or --weights-only")
    listing = read(training, "optimizer", "cfg")
    assert {key.name for key in listing.tensors} == set(WEIGHTS) and listing.documents == {"extra": {"epoch": 3}}
    assert listing.left_out == (
        PartLeftOut("optimizer", ("--leave-out optimizer",), 1, 36),
        PartLeftOut("cfg", ("--leave-out cfg",)),
    )
    inner = read(training, "optimizer", "cfg.made")
    assert inner.documents["extra"] == {"cfg": {"lr": 0.1}, "epoch": 3}


def test_weights_only(training: Path) -> None:
    """Only weights are imported, and everything else is listed; a refused weight is not lost with the rest."""
    listing = read(training, weights_only=True)
    assert {key.name for key in listing.tensors} == set(WEIGHTS) and not listing.documents
    assert left(listing) == dict.fromkeys(("optim/optimizer", "extra/cfg", "extra/epoch"), "--weights-only")
    torch.save({**WEIGHTS, "strange": Config()}, training / "run.pt")
    with pytest.raises(StateMismatch, match=r"has 'strange', which is a .*Config object") as refused:
        read(training, weights_only=True)
    assert refused.value.hint.endswith("go on without: --leave-out strange")
    assert left(read(training, "strange")) == {"strange": "--leave-out strange"}


@pytest.mark.parametrize(
    ("pattern", "kept", "what"),
    [
        ("a.weight", {"b.weight"}, "model/a.weight"),
        ("a", {"b.weight"}, "model/a"),
        ("model/b*", {"a.weight"}, "model/b"),
        ("state_dict.a", {"b.weight"}, "state_dict.a"),
    ],
)
def test_what_a_pattern_matches(training: Path, pattern: str, kept: set[str], what: str) -> None:
    """A tensor by its name, with its group or without, by the beginning of its name, or by its key in the file."""
    listing = read(training, pattern, weights_only=True)
    assert {key.name for key in listing.tensors} == kept
    assert left(listing)[what] == leaving_out.option(pattern)


def test_a_pattern_that_matches_nothing(training: Path) -> None:
    """A wrong name is refused, with names that are like it, and nothing is imported."""
    with pytest.raises(InvalidRequest, match="--leave-out optimiser matches nothing in the source") as refused:
        read(training, "optimiser", "cfg")
    assert "optimizer" in refused.value.hint


def test_files_are_left_out(tmp_path: Path) -> None:
    """A file, or a directory, that is refused is left out by its name, and listed; so are those of `weights_only`."""
    torch.save(dict(WEIGHTS), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (tmp_path / "optimizer.pt").write_bytes(b"12345")
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "model.bin").write_bytes(b"1")
    with pytest.raises(StateMismatch, match=r"optimizer\.pt is training state") as refused:
        read(tmp_path)
    assert refused.value.hint == "go on without: --leave-out optimizer.pt --leave-out critic, or --weights-only"
    listing = read(tmp_path, "optimizer.pt", "critic")
    assert listing.left_out == (
        PartLeftOut("critic", ("--leave-out critic",)),
        PartLeftOut("optimizer.pt", ("--leave-out optimizer.pt",), 0, 5),
    )
    reasons = {use.file: use.reason for use in listing.files if use.use == "unused"}
    assert reasons == dict.fromkeys(("critic", "optimizer.pt"), "left out by choice")
    assert left(read(tmp_path, weights_only=True)).keys() == {"optimizer.pt", "critic"}


@pytest.mark.parametrize(
    ("pattern", "name", "part"),
    [
        ("optim", "optim/a.b/exp_avg", "optim"),
        ("optim/*", "optim/a.b/exp_avg", "optim/a"),
        ("states[1]", "states[1].lr", "states[1]"),
        ("*.exp_avg", "a.exp_avg", "a.exp_avg"),
        ("opt", "optim/a", ""),
        ("OPTIM", "optim", ""),
    ],
)
def test_matching(pattern: str, name: str, part: str) -> None:
    """Whole names, their beginnings up to a dot, slash or bracket, and nothing else."""
    assert matching((pattern,), (name,)) == ({part: (pattern,)} if part else {})


def test_hidden_files_are_noted_once_they_exist() -> None:
    """A name that a reader only tries is not reported as left out, and bytes pass through."""
    hiding = HidingFiles(FilesInMemory({"a.bin": b"12", "b.bin": b"3"}), ("a.bin", "c.bin"))
    assert hiding.size("c.bin") is None and hiding.list("") == ["b.bin"] and hiding.size("b.bin") == 1
    assert hiding.hidden == {"a.bin": ("a.bin",)} and hiding.bytes_of("a.bin") == 2
    buffer = np.empty(1, np.uint8)
    assert hiding.read("b.bin") == b"3" and hiding.read_into("b.bin", 0, buffer) == 1 and bytes(buffer) == b"3"


def test_keys_of_dcp(tmp_path: Path) -> None:
    """Keys of a DCP state dict are left out by name, and one that cannot be read by its own name."""
    made: dict[str, Any] = {
        "model": dict(WEIGHTS),
        "other": {"x": torch.ones(2)},
        "bad": torch.ones(2, dtype=torch.complex128),
    }
    save_ranks(tmp_path, [made])
    with pytest.raises(StateMismatch, match=r"'bad' is torch\.complex128") as refused:
        read(tmp_path)
    assert refused.value.hint.endswith("--leave-out bad")
    listing = read(tmp_path, "bad", "other")
    assert {key.name for key in listing.tensors} == set(WEIGHTS)
    assert listing.left_out == (PartLeftOut("other", ("--leave-out other",), 1, 8), PartLeftOut("bad", ("--leave-out bad",)))


def test_every_error_has_a_hint(tmp_path: Path) -> None:
    """Also one that a reader raises without; the option that leaves a file out is named only if that helps."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has no peft_type") as refused:
        read(tmp_path)
    assert refused.value.hint == "copy it again from its source, or save it again with the program that wrote it"


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    """It is essential, so the hint says how to write it again."""
    (tmp_path / "bad.ckpt").write_bytes(b"hello, world")
    with pytest.raises(StateMismatch, match=r"bad\.ckpt is not a file of torch\.save: it begins with") as refused:
        read(tmp_path)
    assert refused.value.hint.startswith("download or copy it again") and "--leave-out" not in refused.value.hint


def test_everything_left_out(training: Path) -> None:
    """All files, and all tensors, by the options that left them out."""
    with pytest.raises(InvalidRequest, match=r"everything in the source was left out, by --leave-out '\*'") as refused:
        read(training, "*")
    assert refused.value.hint == "leave out less: the source has run.pt"
    wanted = ImportArguments.model_validate({"from": "here", "leave_out": ["model/*", "optimizer", "cfg"]})
    with pytest.raises(InvalidRequest, match="every tensor was left out, by --leave-out") as refused:
        importing.plan_import(hub_snapshot.opened(training), importing.Goal("r", 1, 0), wanted)
    assert refused.value.hint == "leave out less"
