"""The step of a load or save: given as a number, as a DCP checkpoint_id, or not at all."""

from __future__ import annotations

import os
import re
from operator import index
from typing import SupportsIndex

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

_LAST_NUMBER = re.compile(r"(?:.*\D)?(\d+)", re.DOTALL)


def of_id(checkpoint_id: object) -> int:
    """The step of a checkpoint_id: a number, or the number at the end of a path, as in "runs/step-500"."""
    if isinstance(checkpoint_id, SupportsIndex) and not isinstance(checkpoint_id, bool):
        return naming.check_step(index(checkpoint_id))
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, str | os.PathLike) else None
    match = _LAST_NUMBER.fullmatch(os.path.basename(text.rstrip("/"))) if isinstance(text, str) and text.isascii() else None
    if match is None:
        raise InvalidRequest(
            f"checkpoint_id={checkpoint_id!r} contains no step", hint='pass the step, or a path that ends in it: "step-500"'
        )
    return naming.check_step(int(match[1]))
