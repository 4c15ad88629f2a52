"""docs/format.md: its reader reads the golden checkpoint, and what it states is what the code does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors as library
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import dtypes, naming, tensors
from holdfast_formats.digest import digest
from holdfast_formats.disk import manifests, packing, safetensors
from holdfast_formats.staging import arena, wire

DOCUMENT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
GOLDEN = Path(__file__).parents[2] / "golden/v1/golden/checkpoints/step-00000500"
Reader = Callable[[Path], dict[tuple[str, str], Any]]


def documented_reader() -> Reader:
    """The example of the document, as a reader in another program would have copied it."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(source, "docs/format.md", "exec"), namespace)  # the point of the test: this text is a program
    return namespace["read"]


READ = documented_reader()


def section(number: int) -> str:
    return re.split(r"(?m)^## ", DOCUMENT)[number]


def sentences(number: int) -> str:
    """The text of a section as one line: where its lines are wrapped says nothing."""
    return " ".join(section(number).split())


def test_the_documents_reader_imports_no_holdfast() -> None:
    """The example stands for readers in other programs: json, hashlib, xxhash and numpy are enough."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert set(re.findall(r"(?m)^(?:import|from) (\w+)", source)) == {"hashlib", "math", "pathlib", "numpy", "xxhash"}
    assert "import hashlib, json\n" in source


def test_the_documents_reader_reads_the_golden_checkpoint() -> None:
    """It finds every tensor and alias with the bytes that the safetensors library finds."""
    held = READ(GOLDEN)
    assert np.array_equal(held["model", "lm_head.weight"], held["model", "embed.weight"])
    seen = set()
    for path in GOLDEN.glob("*.safetensors"):
        for name, found in library.deserialize(path.read_bytes()):
            array = held[path.name.split("-")[0].split(".")[0], name]
            assert array.tobytes() == bytes(found["data"])
            assert list(array.shape) == list(found["shape"])
            seen.add((path.name.split("-")[0].split(".")[0], name))
    assert seen | {("model", "lm_head.weight")} == set(held)


@given(data=st.data())
def test_the_documents_reader_refuses_a_changed_byte(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One changed byte in any file of the checkpoint, or a file cut short, is refused."""
    copied = tmp_path_factory.mktemp("golden") / "checkpoint"
    shutil.copytree(GOLDEN, copied)
    path = data.draw(st.sampled_from(sorted(copied.iterdir())))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not what was written"):
        READ(copied)


def test_names_are_as_documented() -> None:
    """§ 1 states the very patterns that naming uses."""
    stated = sentences(1)
    for pattern in (naming._RUN, naming._GROUP, naming._FILE):
        assert f"`{pattern.pattern}`" in stated
    for name in (
        naming.LOCK,
        naming.DAEMON_FILE,
        naming.ROOT_FILE,
        naming.CATALOG,
        naming.RUN_FILE,
        naming.COMMIT,
        naming.MANIFEST,
        naming.STATE,
    ):
        assert name in stated
    for room in (naming.CHECKPOINTS, naming.STAGING, naming.TRASH):
        assert f"{room}/step-" in stated
    assert naming.step_directory(500) in stated
    assert naming.staging_directory(1000, 3) in stated
    assert f"{naming.RECEIPTS}/<node>.json" in sentences(9)
    assert (naming.STEP_MAX, naming.ATTEMPT_MAX) == (10**15 - 1, 10**9 - 1)


def test_the_manifests_fields_are_as_documented() -> None:
    """§ 3 names every field of the manifest, of files and of tensors, and the limits are the code's."""
    stated = sentences(3)
    for kind in (manifests.Manifest, manifests.FileEntry, manifests.TensorEntry):
        for field in kind.__struct_fields__:
            assert f"`{field}`" in stated or f'"{field}"' in stated, field
    assert f"{manifests.EXTENT_BYTES_MAX:,}".replace(",", " ") in stated
    assert f"1 to {tensors.NAME_BYTES_MAX} bytes" in stated
    assert f"at most {tensors.DIMENSIONS_MAX} sizes" in stated
    assert digest(b"") in sentences(4)


def test_the_files_are_as_documented() -> None:
    """§ 5 and § 10 state the order of dtypes and the limits."""
    assert f"`{' '.join(dtypes.BITS)}`" in sentences(5)
    assert f"a multiple of {safetensors.DATA_ALIGNMENT_BYTES} bytes" in sentences(5)
    assert f"{packing.FILE_BYTES_MAX:,}".replace(",", " ") in sentences(5)
    assert f"{safetensors.HEADER_BYTES_MAX:,}".replace(",", " ") in sentences(10)


def test_the_arena_is_as_documented() -> None:
    """§ 11's offsets are those of the packed structures."""
    stated = sentences(11)
    assert f"P is {arena.PAGE_BYTES}" in stated
    assert f"slots, 1 to {arena.SLOTS_MAX}" in stated
    lines = dropwhile(lambda line: not line.startswith("|"), section(11).splitlines())
    table = takewhile(lambda line: line.startswith("|"), lines)  # the first one of the section
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    sizes = {"8 bytes": 8, "128 bytes": 128, "u32": 4, "u64": 8}
    for column, packed in ((0, arena._SUPERBLOCK), (2, arena._HEADER)):
        cells = [row[column].split(", ") for row in rows[2:] if row[column]]
        offsets = [int(offset) for offset, _ in cells]
        assert offsets == [sum(sizes[kind] for _, kind in cells[:i]) for i in range(len(cells))]
        assert offsets[-1] + sizes[cells[-1][1]] == packed.size
        assert [sizes[kind] for _, kind in cells] == [
            {"8s": 8, "128s": 128, "I": 4, "Q": 8}[c] for c in re.findall(r"128s|8s|I|Q", packed.format)
        ]
    assert next(int(row[2].split(",")[0]) for row in rows if row[3].startswith("state")) == arena._STATE_OFFSET
    assert next(int(row[2].split(",")[0]) for row in rows if row[3].startswith("seal word")) == arena._SEAL_OFFSET
    for state in arena.SlotState:
        assert f"{state.value} {state.name.lower()}" in stated


def test_the_messages_are_as_documented() -> None:
    """§ 12 names every message and the frame's limit."""
    stated = sentences(12)
    for union in (wire.ToDaemon, wire.ToRank):
        for message in union.__origin__.__args__:
            assert f"`{message.model_fields['type'].default}`" in stated
    assert f"{wire.FRAME_BYTES_MAX:,}".replace(",", " ") in stated
    assert f"protocol {wire.PROTOCOL}" in stated
