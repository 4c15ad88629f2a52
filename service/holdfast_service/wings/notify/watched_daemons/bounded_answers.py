"""Limits the data of another machine by type, not by field, so that new fields are limited, too."""

from __future__ import annotations

from typing import Any

from holdfast_formats import timestamps

LIST_MAX = 1000  # items of a list
MEMBERS_MAX = 100  # of an object
TEXT_MAX = 1000  # characters of a sentence; what is longer is cut
NAME_MAX = 256  # of any other string
TIME_MAX = 64
NUMBER_MAX = 2**63
TEXTS = frozenset({"verdict", "text", "hint"})
TIMES = frozenset({"last_commit", "state_since", "life_since", "last_verified", "created", "since", "at", "until"})
# What Python keeps of each, about, and of a string in addition two bytes for each character.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 64, 128, 1024


class Unbounded(ValueError):
    """Data that no daemon sends."""


class MemoryAllowance:
    """The memory that one machine's data may still take."""

    def __init__(self, size: int) -> None:
        self.left = size

    def bounded(self, value: Any, name: str = "") -> Any:
        """A value as JSON has it, with sentences cut; `Unbounded` for an invalid list, string, number or time.

        It counts against the allowance, which may become negative.
        """
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list):
            if len(value) > LIST_MAX:
                raise Unbounded(f"{name} has {len(value)} items")
            self.left -= _LIST_BYTES
            return [self.bounded(one, name) for one in value]
        self.left -= _VALUE_BYTES
        if isinstance(value, str):
            return self._string(value, name)
        if isinstance(value, (int, float)) and not -NUMBER_MAX < value < NUMBER_MAX:  # which nan is not
            raise Unbounded(f"{name} is an invalid number")
        return value

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        if len(value) > MEMBERS_MAX or any(len(member) > NAME_MAX for member in value):
            raise Unbounded("an object has too many members")
        self.left -= _OBJECT_BYTES
        return {member: self.bounded(one, member) for member, one in value.items()}

    def _string(self, value: str, name: str) -> str:
        if name in TEXTS:
            value = value[:TEXT_MAX]
        elif name in TIMES:
            if not _is_time(value):
                raise Unbounded(f"{name} is not a time")
        elif len(value) > NAME_MAX:
            raise Unbounded(f"{name} has {len(value)} characters")
        self.left -= 2 * len(value)
        return value


def _is_time(text: str) -> bool:
    try:
        timestamps.read(text[: TIME_MAX + 1])
    except ValueError:
        return False
    return len(text) <= TIME_MAX
