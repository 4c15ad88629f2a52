"""GGUF files by hand, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.gguf import encoding
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned, Value

HEADS, KEY_HEADS, LAYERS = 4, 2, 1
LLAMA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.attention.head_count": Unsigned(HEADS),
    "llama.attention.head_count_kv": Unsigned(KEY_HEADS),
    "tokenizer.ggml.tokens": ["a", "b", "é"],
    "tokenizer.ggml.scores": [0.5, 1.5, -1.0],
}
Arrays = Mapping[str, np.ndarray[Any, Any]]
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def encoded(metadata: Mapping[str, Value], arrays: Arrays) -> bytes:
    specs = [TensorSpec("gguf", name, _DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()]
    data = encoding.header(metadata, specs)
    for array in arrays.values():
        data += array.tobytes() + bytes(encoding.aligned(array.nbytes) - array.nbytes)
    return data


def interleaved(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As `LlamaModel.permute` of llama.cpp's converter."""
    rows, *rest = array.shape
    return np.ascontiguousarray(array.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(array.shape))


def llama(dtype: Any, width: int = 16) -> dict[str, tuple[str, np.ndarray[Any, Any], int]]:
    """Hugging Face's names, with GGUF's, the array in Hugging Face's layout, and the heads by which rows are interleaved."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int, of: Any = dtype) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(of)

    at, here = "model.layers.0.", "blk.0."
    return {
        "model.embed_tokens.weight": ("token_embd.weight", drawn(3, width), 0),
        f"{at}self_attn.q_proj.weight": (f"{here}attn_q.weight", drawn(width, width), HEADS),
        f"{at}self_attn.k_proj.weight": (f"{here}attn_k.weight", drawn(width // 2, width), KEY_HEADS),
        f"{at}self_attn.q_proj.bias": (f"{here}attn_q.bias", drawn(width, of=np.float32), HEADS),
        f"{at}mlp.up_proj.weight": (f"{here}ffn_up.weight", drawn(2 * width, width), 0),
        f"{at}input_layernorm.weight": (f"{here}attn_norm.weight", drawn(width, of=np.float32), 0),
        "model.norm.weight": ("output_norm.weight", drawn(width, of=np.float32), 0),
    }


def a_llama(path: Path, dtype: Any, more: Arrays | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Write a small Llama; its arrays in Hugging Face's names and layout."""
    held = llama(dtype)
    arrays = {name: interleaved(array, heads) if heads else array for name, array, heads in held.values()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(LLAMA, {**arrays, **(more or {})}))
    return {name: array for name, (_, array, _) in held.items()}
