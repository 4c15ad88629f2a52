"""All kinds of foreign checkpoints that an import understands. A new one is a line here."""

from __future__ import annotations

from holdfast_formats.foreign import hugging_face
from holdfast_formats.foreign.kinds import ForeignKind

KINDS: tuple[ForeignKind, ...] = (hugging_face.KIND,)
