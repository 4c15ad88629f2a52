"""The kinds of Paddle's checkpoints."""

from __future__ import annotations

from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.paddle import flex, lora, sharding_io, unified

PADDLE_KINDS: tuple[ForeignKind, ...] = (unified.KIND, flex.KIND, sharding_io.KIND, lora.KIND)
