"""How the state of a run's ranks is stored, in the record of attempts and in the catalog.

The stored words are older than those of the API. They stay, because daemons of two versions may read one root.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BeforeValidator, PlainSerializer

from holdfast_formats.rest.measurements import Life

_STORED: dict[Life, str] = {"running": "running", "finished": "ended", "died": "lost"}


def write(life: Life | None) -> str | None:
    return None if life is None else _STORED[life]


def read(word: Any) -> Life:
    """The state; any other word as it is."""
    return next((life for life, stored in _STORED.items() if stored == word), cast(Life, word))


StoredLife = Annotated[Life, BeforeValidator(read), PlainSerializer(write)]
