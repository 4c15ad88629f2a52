"""All kinds of foreign checkpoints that an import supports. A new one is a line here."""

from __future__ import annotations

from holdfast_formats.foreign import hugging_face, peft_adapter, torch_weights
from holdfast_formats.foreign.dcp import kinds as dcp
from holdfast_formats.foreign.deepspeed import kinds as deepspeed
from holdfast_formats.foreign.kinds import ForeignKind
from holdfast_formats.foreign.paddle.kinds import PADDLE_KINDS

KINDS: tuple[ForeignKind, ...] = (
    hugging_face.KIND,
    peft_adapter.KIND,
    deepspeed.KIND,
    torch_weights.DIRECTORY_KIND,
    torch_weights.FILE_KIND,
    *PADDLE_KINDS,
    *dcp.KINDS,
)
