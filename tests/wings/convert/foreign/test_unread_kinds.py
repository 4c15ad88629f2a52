"""What a directory is, is said also where it cannot be read, with the way on."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.wings.convert.foreign.directories import OnDisk

SKLEARN = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x14sklearn.linear_model\x94."


def put(directory: Path, files: dict[str, bytes]) -> OnDisk:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return OnDisk(directory)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"_CHECKPOINT_METADATA": b"{}", "about/metadata": b"{}"}, "an Orbax checkpoint of JAX without a tree"),
        ({"saved_model.pb": b""}, "a SavedModel of TensorFlow"),
        ({"ckpt-1.index": b"", "ckpt-1.data-00000-of-00001": b"", "checkpoint": b""}, "a checkpoint of TensorFlow"),
        ({"model.keras": b""}, "a model of Keras"),
        ({"model.weights.h5": b""}, "a file of weights of Keras"),
        ({"flax_model.msgpack": b"", "config.json": b"{}"}, "a model of Flax"),
        ({"model.pt2": b""}, "a program that torch.export saved"),
        ({"model.onnx": b"", "config.json": b"{}"}, "a model of ONNX"),
        ({"rank0.engine": b""}, "an engine of TensorRT"),
        ({"model.mlpackage/Data/x": b""}, "a model of Core ML"),
        ({"m.tflite": b""}, "a model of TensorFlow Lite"),
        ({"openvino_model.xml": b""}, "a model of OpenVINO"),
        ({"llama.ggml": b""}, "a file of GGML"),
        ({"weights.npz": b""}, "a file of numpy arrays"),
        ({"booster.ubj": b""}, "a model of XGBoost"),
        ({"model.pkl": SKLEARN}, "a pickle of scikit-learn"),
        ({"model.joblib": pickle.dumps({"a": 1})}, "a pickle of Python objects"),
        ({"checkpoint-100/x": b"", "checkpoint-200/x": b""}, "a directory of checkpoints"),
        ({"900/_CHECKPOINT_METADATA": b"{}", "1000/_CHECKPOINT_METADATA": b"{}"}, "a directory of checkpoints"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_is(tmp_path: Path, files: dict[str, bytes], what: str) -> None:
    """By the names of its files; the hint is a next step, not the list of all kinds."""
    with pytest.raises(StateMismatch, match=f"this is {what}") as refused:
        choose(put(tmp_path, files), None, KINDS)
    assert refused.value.hint is not None and "known kinds" not in refused.value.hint
    assert refused.value.members["file"] in {name.partition("/")[0] for name in files}


def test_one_checkpoint_of_several_is_named(tmp_path: Path) -> None:
    """The newest, by its number."""
    with pytest.raises(StateMismatch, match=r"\(checkpoint-10\)") as refused:
        choose(put(tmp_path, {"checkpoint-5/x": b"", "checkpoint-10/x": b""}), None, KINDS)
    assert refused.value.hint == "import one of them, such as the newest: SRC/checkpoint-10"


def test_anything_else(tmp_path: Path) -> None:
    """Its files are listed, an archive is to be unpacked or imported itself, and all kinds are."""
    with pytest.raises(StateMismatch, match=r"no known kind of checkpoint has these files: notes\.txt") as refused:
        choose(put(tmp_path / "a", {"notes.txt": b""}), None, KINDS)
    assert "a Hugging Face model" in (refused.value.hint or "")
    with pytest.raises(StateMismatch) as refused:
        choose(put(tmp_path / "b", {"model.tgz": b""}), None, KINDS)
    assert "unpack" in (refused.value.hint or "")
    with pytest.raises(StateMismatch) as refused:
        choose(put(tmp_path / "c", {"model.nemo": b"", "notes.txt": b""}), None, KINDS)
    assert refused.value.hint == "import the archive itself: SRC/model.nemo"
