"""The ways to export, by the name that `--as` takes."""

from __future__ import annotations

from holdfast_formats.errors import InvalidRequest
from holdfast_service.wings.convert.exports import (
    dcp,
    deepspeed_universal,
    diffusers,
    gguf,
    hugging_face,
    megatron,
    peft,
    trainer,
)
from holdfast_service.wings.convert.exports.paddle import flex, lora, sharding_io, unified
from holdfast_service.wings.convert.exports.plan import ExportKind

KINDS: tuple[ExportKind, ...] = (
    hugging_face.KIND,
    trainer.KIND,
    peft.KIND,
    diffusers.KIND,
    dcp.KIND,
    megatron.KIND,
    deepspeed_universal.KIND,
    gguf.KIND,
    unified.KIND,
    flex.KIND,
    sharding_io.KIND,
    lora.KIND,
)
NAMES: tuple[str, ...] = tuple(kind.name for kind in KINDS)


def kind_named(name: str) -> ExportKind:
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise InvalidRequest(f"cannot export as {name!r}: unknown format", hint=f"one of {', '.join(NAMES)}")
