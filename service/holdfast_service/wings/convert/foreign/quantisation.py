"""Quantised models of Hugging Face: codes, scales and configuration are stored as they are, and loaded as from the source.

Only the library that the configuration names can read the codes. Nothing here decodes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import leaving_out

KEY, CONFIG = "quantization_config", "config.json"
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # AutoGPTQ's, AutoAWQ's and ModelOpt's
_TORCHAO = "tensor_names"  # in the metadata of safetensors files: a tensor of torchao's is several, and a class
_CODES = re.compile(
    r".*(\.qweight|\.qzeros|\.g_idx|\.SCB|\.absmax|\.quant_map|\.nested_absmax|\.quant_state\..*|\.weight_scale(_inv)?"
    r"|\.weight_packed|_codes|\.codes|_quant_scales?)"
)
_CODE_DTYPES = frozenset(
    {"I8", "U8", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)


def method(config: Mapping[str, Any]) -> str | None:
    """How the weights of a model with this config.json are quantised; None if they are not."""
    inner = config.get("text_config")
    described = config.get(KEY) or (inner.get(KEY) if isinstance(inner, Mapping) else None)
    if not described:
        return None
    named = described.get("quant_method") if isinstance(described, Mapping) else None
    if named is None and isinstance(described, Mapping) and any(str(key).startswith("load_in_") for key in described):
        named = "bitsandbytes"  # whose configuration had no name at first
    return str(named or described)


def notes(
    tensors: Iterable[ForeignTensor], config: Mapping[str, Any], names: Iterable[str], options: ReadOptions
) -> tuple[str, ...]:
    """What the report says of quantised weights, beside files of these names; empty if there are none.

    `StateMismatch` for a tensor that looks like codes, if nothing describes them and they were not asked for as they are.
    """
    how = method(config) or next((f"by {name}" for name in names if name in _FILES), None)
    if how is None:
        codes = next((tensor for tensor in tensors if are_codes(tensor.spec)), None)
        if codes is None:
            return ()
        if not options.as_is:
            name, dtype, file = codes.spec.name, codes.spec.dtype, min(leaving_out.files_of([codes]))
            raise StateMismatch(
                f"tensor {name!r} in {file} looks like quantised weights ({dtype}), but {CONFIG} has no {KEY}",
                hint=f"add the model's {CONFIG}, or store the codes without one: --as-is",
                tensor=name,
                file=file,
            )
    return (f"the weights are quantised ({how or 'how is not known'}): codes and scales are stored as they are",)


def are_codes(spec: TensorSpec) -> bool:
    """Whether a tensor looks like codes or their scales."""
    return _CODES.fullmatch(spec.name) is not None or (spec.dtype in _CODE_DTYPES and spec.name.endswith("weight"))


def check_metadata(file: str, metadata: Mapping[str, str]) -> None:
    """`StateMismatch` for torchao's tensors, which are described by the metadata of their file."""
    if _TORCHAO in metadata:
        raise StateMismatch(
            f"{file} describes torchao's quantised tensors in its metadata, which a checkpoint does not keep",
            hint="import the unquantised model, and quantise it where it is loaded: quantization_config=TorchAoConfig(…)",
            file=file,
        )


def refuse(how: str | None, what: str, hint: str) -> None:
    """`StateMismatch` for quantised weights, of which `what` would make something else."""
    if how is not None:
        raise StateMismatch(f"the weights are quantised ({how}): {what}", hint=hint)
