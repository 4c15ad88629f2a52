"""Names what a directory is that no kind here reads, and the way on: a line of code of the program that wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_service.wings.convert.foreign import file_signs
from holdfast_service.wings.convert.foreign.nemo.archive import ENDING

HEAD_BYTES = 2**16  # of a pickle, in which the modules of its first objects are named
NAMED_MAX = 8
_ONE_STEP = re.compile(r"((checkpoint|step|iter|global_step|epoch|ckpt)[-_=]?\d+.*|\d+)")
_PICKLED = re.compile(r".+\.(pkl|pickle|joblib)", re.IGNORECASE)
_SAVE = "save its arrays in a directory: safetensors.numpy.save_file(arrays, 'model.safetensors', {'format': 'pt'})"
_TORCH = "import the model that it was made from: save_pretrained(DIRECTORY) of transformers writes one"


class _Sign(NamedTuple):
    """Names of files that only one program writes; all of the patterns must match one each."""

    names: tuple[str, ...]
    what: str
    hint: str


_SIGNS = (
    _Sign(
        (r"_CHECKPOINT_METADATA",),
        "an Orbax checkpoint of JAX without a tree of arrays",
        f"load it: orbax.checkpoint.PyTreeCheckpointer().restore(PATH); {_SAVE}",
    ),
    _Sign((r"saved_model\.pb",), "a SavedModel of TensorFlow", f"load it: tf.saved_model.load(DIRECTORY); {_SAVE}"),
    _Sign(
        (r".+\.index", r".+\.data-\d{5}-of-\d{5}"),
        "a checkpoint of TensorFlow",
        f"load it: tf.train.load_checkpoint(DIRECTORY).get_tensor(NAME); {_SAVE}",
    ),
    _Sign(
        (r".+\.weights\.h5",),
        "a file of weights of Keras",
        f"load it into its model: model.load_weights(FILE), then model.get_weights(); {_SAVE}",
    ),
    _Sign((r".+\.(keras|h5|hdf5)",), "a model of Keras", f"load it: keras.saving.load_model(FILE).get_weights(); {_SAVE}"),
    _Sign((r"flax_model.*\.msgpack",), "a model of Flax", f"load it: flax.serialization.msgpack_restore(DATA); {_SAVE}"),
    _Sign(
        (r".+\.pt2",),
        "a program that torch.export saved",
        "save its weights: torch.save(torch.export.load(FILE).state_dict, 'model.pt')",
    ),
    _Sign((r".+\.onnx(_data)?",), "a model of ONNX", _TORCH),
    _Sign((r".+\.(engine|plan)",), "an engine of TensorRT", _TORCH),
    _Sign((r".+\.(mlmodel|mlpackage)",), "a model of Core ML", _TORCH),
    _Sign((r".+\.tflite",), "a model of TensorFlow Lite", _TORCH),
    _Sign((r"(openvino_)?model\.xml",), "a model of OpenVINO", _TORCH),
    _Sign(
        (r"(.*ggml.*\.bin|.+\.ggml)",),
        "a file of GGML, which GGUF has replaced",
        "convert it to GGUF with llama.cpp, and import that",
    ),
    _Sign((r".+\.(npz|npy)",), "a file of numpy arrays", f"load them: arrays = dict(numpy.load(FILE)); {_SAVE}"),
    _Sign(
        (r".+\.(ubj|xgb)",),
        "a model of XGBoost",
        "there are no tensors to import: keep it as a file, assets={…} of Checkpointer.save",
    ),
)
_MODULES = {
    b"sklearn": "scikit-learn",
    b"xgboost": "XGBoost",
    b"lightgbm": "LightGBM",
    b"jax": "JAX",
    b"tensorflow": "TensorFlow",
}


def refuse(files: Files, titles: Iterable[str]) -> StateMismatch:
    """The error for a directory that no kind recognises: what it is, if its names say that."""
    names = files.list("")
    nemo = next((f"import the archive itself: SRC/{name}" for name in names if name.lower().endswith(ENDING)), None)
    packed = nemo or next((archive for name in names if (archive := file_signs.archive(name))), None)
    for sign in _SIGNS:
        found = [
            next((name for name in names if re.fullmatch(pattern, name, re.IGNORECASE)), None) for pattern in sign.names
        ]
        if all(found):
            return _named(sign.what, str(found[0]), sign.hint)
    pickled = next((name for name in names if _PICKLED.fullmatch(name) and files.size(name) is not None), None)
    if pickled is not None:
        return _named(_pickle(files, pickled), pickled, f"no pickle is loaded; with the program that wrote it, {_SAVE}")
    steps = [name for name in names if _ONE_STEP.fullmatch(name) and files.size(name) is None]
    if steps:
        newest = max(steps, key=natural_key)
        return _named("a directory of checkpoints", newest, f"import one of them, such as the newest: SRC/{newest}")
    shown = f"{', '.join(names[:NAMED_MAX]) or 'none'}{' …' if len(names) > NAMED_MAX else ''}"
    return StateMismatch(
        f"no known kind of checkpoint has these files: {shown}", hint=packed or f"known kinds: {', '.join(titles)}"
    )


def _named(what: str, file: str, hint: str) -> StateMismatch:
    return StateMismatch(f"this is {what} ({file}), which cannot be imported", hint=hint, file=file)


def _pickle(files: Files, name: str) -> str:
    head = files.read(name, 0, HEAD_BYTES)
    program = next((program for module, program in _MODULES.items() if module in head), None)
    return f"a pickle of {program}" if program is not None else "a pickle of Python objects"
