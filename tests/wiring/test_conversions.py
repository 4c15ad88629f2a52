"""Conversions from directory to directory: the same bytes as an import and an export, and refused alike."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.foreign.kinds import ReadOptions
from holdfast_service.control.checkpoints import roots
from holdfast_service.daemon.copying import converting
from holdfast_service.daemon.copying.foreign_export import ExportTerms
from holdfast_service.daemon.copying.importing import ImportOptions
from holdfast_service.storage import PosixStore, PosixTier
from holdfast_service.wiring import exports
from holdfast_service.wiring.exports import ExportWork, ForeignExport
from holdfast_service.wiring.imports import WantedImport
from holdfast_service.wiring.progress import Quiet
from holdfast_service.wiring.transfers import Transfers
from tests.checkpoints import build
from tests.daemon.copies_world import CopiesWorld, copies_world
from tests.formats.exports.sources import LLAMA, llama, trained, values_of

WEIGHTS = llama(hidden=16)
STEP = 2
KINDS = ("hf", "peft", "dcp", "paddle-uc", "paddle-flex")
ADAPTER = {
    f"base_model.model.layers.{n}.q.lora_{side}.weight": np.full(shape, n, np.float32)
    for n in range(2)
    for side, shape in (("A", (2, 8)), ("B", (8, 2)))
}
PROGRAM = """
name = "up"
from = "hf"
to = "mine"
statements = '''
model.layers.$LAYER_ID.mlp.up_proj.weight^T -> model.layers.$LAYER_ID.UP.weight
* -> *
'''
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CopiesWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        assets = {"config.json": json.dumps(LLAMA).encode()}
        path = made.root / naming.checkpoint_path("llama", STEP)
        build(path, trained(WEIGHTS), run="llama", step=STEP, assets=assets, ranks=values_of(list(WEIGHTS)))
        adapter = {"adapter_config.json": json.dumps({"peft_type": "LORA", "r": 2}).encode()}
        path = made.root / naming.checkpoint_path("adapter", STEP)
        build(path, {"adapter": ADAPTER}, run="adapter", step=STEP, assets=adapter)
        roots.reconcile(PosixStore(made.tier), made.catalog)
        yield made


@pytest.fixture
def transfers(world: CopiesWorld) -> Transfers:
    return Transfers(world.tier, world.decisions, world.repairer)


def converted(source: Path, target: Path, terms: ExportTerms, **options: bool) -> dict[str, Any]:
    conversion = converting.plan_conversion(PosixTier(source), None, ReadOptions(**options), terms)
    return exports.convert(conversion, ExportWork(PosixTier(target.parent), target.name, Quiet()))


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_an_import_and_an_export(transfers: Transfers, tmp_path: Path, kind: str) -> None:
    """Byte by byte, to whatever kind, with and without a program; what the two cannot do together is refused alike."""
    place, outcomes = tmp_path / "place", []
    run = "adapter" if kind == "peft" else "llama"
    transfers.export(PosixTier(place), ForeignExport(run, STEP, "source", ExportTerms(kind)), Quiet())
    transfers.bring(PosixTier(place / "source"), WantedImport("again", STEP, ImportOptions()), Quiet())
    before = files_of(place / "source")
    for made_as, program in product(KINDS, (None, PROGRAM)):
        terms = ExportTerms(made_as, program=program)
        try:
            transfers.export(PosixTier(place), ForeignExport("again", STEP, "both", terms), Quiet())
        except CheckpointError as refused:
            with pytest.raises(type(refused)) as caught:
                converted(place / "source", place / "once", terms)
            assert caught.value.detail == refused.detail
            outcomes.append(None)
        else:
            done = converted(place / "source", place / "once", terms)
            assert files_of(place / "once") == files_of(place / "both"), (made_as, program)
            assert done["files"] == len(files_of(place / "once"))
            assert {file["file"] for file in done["source"]["files"]} == before.keys()
            outcomes.append(made_as)
            for name in ("both", "once"):
                shutil.rmtree(place / name)
        assert os.listdir(place) == ["source"] and files_of(place / "source") == before
    assert set(outcomes) >= ({"peft", "dcp"} if kind == "peft" else set(KINDS) - {"peft"})
