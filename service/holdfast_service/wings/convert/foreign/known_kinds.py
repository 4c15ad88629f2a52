"""All kinds of foreign checkpoints that an import supports. A new one is a line here."""

from __future__ import annotations

from holdfast_service.wings.convert.foreign import diffusers, hugging_face, peft_adapter, torch_weights
from holdfast_service.wings.convert.foreign.dcp import kinds as dcp
from holdfast_service.wings.convert.foreign.deepspeed import kinds as deepspeed
from holdfast_service.wings.convert.foreign.gguf import kinds as gguf
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.megatron_ranks import kinds as megatron_ranks
from holdfast_service.wings.convert.foreign.nemo import kinds as nemo
from holdfast_service.wings.convert.foreign.orbax import kinds as orbax
from holdfast_service.wings.convert.foreign.paddle import flex, lora, sharding_io, unified
from holdfast_service.wings.convert.foreign.trainers import accelerate, trainer

KINDS: tuple[ForeignKind, ...] = (
    hugging_face.KIND,
    peft_adapter.KIND,
    trainer.KIND,
    accelerate.KIND,
    diffusers.KIND,
    deepspeed.KIND,
    megatron_ranks.KIND,
    torch_weights.DIRECTORY_KIND,
    torch_weights.FILE_KIND,
    gguf.KIND,
    orbax.KIND,
    unified.KIND,
    flex.KIND,
    sharding_io.KIND,
    lora.KIND,
    *dcp.KINDS,
    nemo.KIND,
)
